"""Benchmarks: bytes verified first, then times beside a baseline in the same run (`make bench`). rows.py says what is measured."""
