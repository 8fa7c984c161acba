"""Makes ``_interface.py`` of src/outrider.h: run ``python -m outrider.native.generate``."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from zlib import crc32

FOLDER = Path(__file__).parent
HEADER = FOLDER / "src" / "outrider.h"
MODULE = FOLDER / "_interface.py"


def interface_module(header: str) -> str:
    """Return the module that stands for a C header: its constants, cffi's table, parameters' names.

    ``ABI`` is a checksum of the declarations, without comments and spaces.
    """
    import cffi  # with a parser of C, which nobody needs at run time

    code = re.sub(r"//.*", "", header)
    code = re.sub(r"#ifdef __cplusplus\n.*?#endif", "", code, flags=re.S)
    values = re.findall(r"^#define (\w+) (.+)$", code, re.M)
    constants = [f"{name} = {value}" for name, value in values]
    declarations = re.sub(r"^#.*$|OUTRIDER_(API|NOEXCEPT)", "", code, flags=re.M)
    parameters = {
        name: tuple(re.findall(r"(\w+)\s*(?:,|$)", listed.replace("void", "")))
        for name, listed in re.findall(r"\boutrider_(\w+)\((.*?)\)\s*;", declarations, re.S)
    }
    abi = crc32("".join(code.split()).encode())
    ffi = cffi.FFI()
    ffi.cdef(declarations)
    ffi.set_source("_interface", None)
    with tempfile.TemporaryDirectory() as folder:
        ffi.emit_python_code(f"{folder}/_interface.py")
        table = Path(folder, "_interface.py").read_text().partition("import _cffi_backend\n")[2]
    return "\n".join(
        (
            '"""Made of src/outrider.h by generate.py; do not edit."""',
            "# mypy: ignore-errors",
            "import _cffi_backend",
            f"\nABI = {abi:#x}",
            *constants,
            f"PARAMETERS = {parameters}",
            table.strip(),
            "",
        )
    )


if __name__ == "__main__":
    MODULE.write_text(interface_module(HEADER.read_text()))
