// One translation unit, so one fatbin: setup.py embeds it into the library.
#include "encode.cuh"
#include "rows.cuh"
