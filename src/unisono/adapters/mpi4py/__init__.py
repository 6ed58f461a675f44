"""mpi4py's names on unisono: programs for mpi4py run as they are.

`names` puts them together; `comm`, `topology`, `windows` and `files` have the classes. An argument
becomes memory in `buffers`, and a datatype is a list of bytes in `datatypes`. Each call is a
`requests.Ongoing`. Groups, messages, windows and collective calls are unisono's own.
"""
