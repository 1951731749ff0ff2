"""`hsxfer demo`: real sglang, a draft head that trains from it in another process, and a table measured in the same run.

In reading order: `run` (the plot), `server` (sglang), `text` (prompts), `trainer` and `draft` (from a handle to the loss),
`compare` (stock sglang beside hsxfer), `screen`.
"""
