"""Program that runs the cells it is given in a real kernel of Jupyter and prints what they show.

python notebook_run.py < cells.json        a list of texts; prints a list of lists of outputs
"""

import json
import sys

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(text) for text in json.load(sys.stdin)]
manager = AsyncKernelManager()
manager._kernel_spec = KernelSpec(
    argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
)
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, km=manager, timeout=60, allow_errors=True).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
