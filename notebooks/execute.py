"""python notebooks/execute.py [NAME ...]

Run the notebooks (or those named) from top to bottom and write their outputs into them. Warnings are left out, because
they hold paths of the machine, and so are times and other metadata: a page changes only where its results do.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path, folder: Path = HERE, timeout: float = 1200) -> nbformat.NotebookNode:
    """The notebook after a run in a kernel whose working folder is ``folder``.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where, record_timing=False).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output["data"] = {"image/png": output["data"]["image/png"]}
                    output["metadata"] = {}
    return notebook


if __name__ == "__main__":
    for file in [HERE / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        print(file.name, flush=True)
        nbformat.write(execute(file), file)
