"""MPI's exception, and the error class of each error of unisono."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from unisono.adapters.mpi4py.constants import ERR_LASTCODE, ERRORS, SUCCESS
from unisono.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
)

_names = {number: name for name, number in ERRORS.items()}
# Classes and codes that the program has added: the class of each, and texts.
_added: dict[int, int] = {}
_texts: dict[int, str] = {}


def _error_class(code: int) -> int:
    if code == SUCCESS or code in _names:
        return code
    try:
        return _added[code]
    except KeyError:
        raise Exception(ERRORS["ERR_ARG"]) from None


class Exception(RuntimeError):
    """An error of MPI: its class, and the text of the error of unisono that caused it."""

    def __init__(self, ierr: int = SUCCESS, text: str = "", /) -> None:
        if ierr < SUCCESS or ierr > ERR_LASTCODE:
            ierr = ERRORS["ERR_UNKNOWN"]
        RuntimeError.__init__(self, ierr)
        self.ob_ierr, self._text = ierr, text

    def __int__(self) -> int:
        return self.ob_ierr

    def __bool__(self) -> bool:
        return self.ob_ierr != SUCCESS

    def __hash__(self) -> int:
        return hash(self.ob_ierr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, Exception)) and self.ob_ierr == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self.ob_ierr < int(other)

    def __le__(self, other: Any) -> bool:
        return self.ob_ierr <= int(other)

    def __gt__(self, other: Any) -> bool:
        return self.ob_ierr > int(other)

    def __ge__(self, other: Any) -> bool:
        return self.ob_ierr >= int(other)

    def __repr__(self) -> str:
        return f"MPI.Exception({_names.get(self.ob_ierr, self.ob_ierr)})"

    def __str__(self) -> str:
        return self.error_string

    @property
    def error_code(self) -> int:
        """The code, which is a class, or belongs to one."""
        return self.ob_ierr

    @property
    def error_class(self) -> int:
        """The class of the code."""
        return _error_class(self.ob_ierr)

    @property
    def error_string(self) -> str:
        """What happened."""
        return self._text or get_error_string(self.ob_ierr)

    def Get_error_code(self) -> int:
        """Return `error_code`."""
        return self.error_code

    def Get_error_class(self) -> int:
        """Return `error_class`."""
        return self.error_class

    def Get_error_string(self) -> str:
        """Return `error_string`."""
        return self.error_string


def fail(name: str, text: str = "") -> NoReturn:
    """Raise the exception of an error class."""
    raise Exception(ERRORS[name], f"MPI_{name}: {text}" if text else "")


def require(condition: object, name: str, text: str = "") -> None:
    """Raise the exception of an error class unless the condition holds."""
    if not condition:
        fail(name, text)


_CLASSES: dict[type[BaseException], str] = {
    CollectiveMismatchError: "ERR_TRUNCATE",
    CollectiveTimeoutError: "ERR_PENDING",
    PeerLostError: "ERR_PROC_FAILED",
    PeerFailedError: "ERR_PROC_ABORTED",
    UnsupportedError: "ERR_UNSUPPORTED_OPERATION",
    MemoryError: "ERR_NO_MEM",
}


def exception_of(error: BaseException) -> BaseException:
    """Return MPI's exception for an error of unisono, with its text; other errors as they are."""
    if not isinstance(error, (UnisonoError, MemoryError)) or isinstance(error, NotImplementedError):
        return error
    name = next((name for kind, name in _CLASSES.items() if isinstance(error, kind)), "ERR_OTHER")
    made = Exception(ERRORS[name], f"MPI_{name}: {error}")
    made.__cause__ = error
    return made


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise MPI's exception for an error of unisono."""
    try:
        yield
    except (UnisonoError, MemoryError) as error:
        raise exception_of(error) from error


def get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    return _error_class(errorcode)


def get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if errorcode in _texts:
        return _texts[errorcode]
    if errorcode == SUCCESS:
        return "MPI_SUCCESS: no error"
    _error_class(errorcode)
    return f"MPI_{_names[errorcode]}" if errorcode in _names else ""


def _new_code() -> int:
    code = max([*_names, *_added, 1 << 20]) + 1
    _texts[code] = ""
    return code


def add_error_class() -> int:
    """Make an error class."""
    code = _new_code()
    _added[code] = code
    return code


def add_error_code(errorclass: int) -> int:
    """Make a code of a class."""
    kind, code = _error_class(errorclass), _new_code()
    _added[code] = kind
    return code


def add_error_string(errorcode: int, string: str) -> None:
    """Set the text of a code that was added."""
    require(errorcode in _added, "ERR_ARG")
    _texts[errorcode] = string


def remove_error_class(errorclass: int) -> None:
    """Remove a class that was added, and has no codes any more."""
    require(_added.get(errorclass) == errorclass, "ERR_ARG")
    require(list(_added.values()).count(errorclass) == 1, "ERR_OTHER")
    remove_error_code(errorclass)


def remove_error_code(errorcode: int) -> None:
    """Remove a code that was added."""
    require(errorcode in _added, "ERR_ARG")
    del _added[errorcode]
    _texts.pop(errorcode, None)


def remove_error_string(errorcode: int) -> None:
    """Remove the text of a code that was added."""
    require(errorcode in _added and _texts.get(errorcode), "ERR_ARG")
    _texts[errorcode] = ""
