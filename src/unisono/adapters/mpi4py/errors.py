"""MPI's numbers, those of MPICH, and its exception: the class of each error of unisono."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

from unisono.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
)


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (each.split("=") for each in text.split())}


NUMBERS = _numbers(
    "UNDEFINED=-32766 ANY_SOURCE=-2 ANY_TAG=-1 PROC_NULL=-1 ROOT=-3 KEYVAL_INVALID=603979776 "
    "TAG_UB=1681915905 IO=1681915909 WTIME_IS_GLOBAL=1681915911 UNIVERSE_SIZE=1681915913 "
    "APPNUM=1681915917 LASTUSEDCODE=1681915915 WIN_BASE=1711276033 WIN_SIZE=1711276035 "
    "WIN_DISP_UNIT=1711276037 WIN_CREATE_FLAVOR=1711276039 WIN_FLAVOR=1711276039 "
    "WIN_MODEL=1711276041 SUCCESS=0 ORDER_C=56 ORDER_FORTRAN=57 ORDER_F=57 TYPECLASS_LOGICAL=4 "
    "TYPECLASS_INTEGER=2 TYPECLASS_REAL=1 TYPECLASS_COMPLEX=3 DISTRIBUTE_NONE=123 "
    "DISTRIBUTE_BLOCK=121 DISTRIBUTE_CYCLIC=122 DISTRIBUTE_DFLT_DARG=-49767 COMBINER_NAMED=1 "
    "COMBINER_DUP=2 COMBINER_CONTIGUOUS=3 COMBINER_VECTOR=4 COMBINER_HVECTOR=6 "
    "COMBINER_INDEXED=7 COMBINER_HINDEXED=9 COMBINER_INDEXED_BLOCK=10 "
    "COMBINER_HINDEXED_BLOCK=19 COMBINER_STRUCT=12 COMBINER_SUBARRAY=13 COMBINER_DARRAY=14 "
    "COMBINER_RESIZED=18 COMBINER_VALUE_INDEX=20 COMBINER_F90_INTEGER=17 COMBINER_F90_REAL=15 "
    "COMBINER_F90_COMPLEX=16 IDENT=0 CONGRUENT=1 SIMILAR=2 UNEQUAL=3 CART=2 GRAPH=1 "
    "DIST_GRAPH=3 COMM_TYPE_SHARED=1 COMM_TYPE_HW_GUIDED=2 COMM_TYPE_HW_UNGUIDED=3 "
    "COMM_TYPE_RESOURCE_GUIDED=4 BSEND_OVERHEAD=96 WIN_FLAVOR_CREATE=1 WIN_FLAVOR_ALLOCATE=2 "
    "WIN_FLAVOR_DYNAMIC=3 WIN_FLAVOR_SHARED=4 WIN_SEPARATE=1 WIN_UNIFIED=2 MODE_NOCHECK=1024 "
    "MODE_NOSTORE=2048 MODE_NOPUT=4096 MODE_NOPRECEDE=8192 MODE_NOSUCCEED=16384 "
    "LOCK_EXCLUSIVE=234 LOCK_SHARED=235 MODE_RDONLY=2 MODE_WRONLY=4 MODE_RDWR=8 MODE_CREATE=1 "
    "MODE_EXCL=64 MODE_DELETE_ON_CLOSE=16 MODE_UNIQUE_OPEN=32 MODE_SEQUENTIAL=256 "
    "MODE_APPEND=128 SEEK_SET=600 SEEK_CUR=602 SEEK_END=604 DISPLACEMENT_CURRENT=-54278278 "
    "DISP_CUR=-54278278 THREAD_SINGLE=0 THREAD_FUNNELED=1 THREAD_SERIALIZED=2 THREAD_MULTIPLE=3 "
    "VERSION=4 SUBVERSION=1 MAX_PROCESSOR_NAME=128 MAX_ERROR_STRING=512 MAX_PORT_NAME=1024 "
    "MAX_INFO_KEY=255 MAX_INFO_VAL=1024 MAX_OBJECT_NAME=128 MAX_DATAREP_STRING=128 "
    "MAX_LIBRARY_VERSION_STRING=8192 MAX_PSET_NAME_LEN=256 MAX_STRINGTAG_LEN=256 "
)
"""All constants that are integers, by name, without the error classes."""

ERRORS = _numbers(
    "ERR_TYPE=3 ERR_REQUEST=19 ERR_OP=9 ERR_GROUP=8 ERR_INFO=28 ERR_ERRHANDLER=80 "
    "ERR_SESSION=75 ERR_COMM=5 ERR_WIN=45 ERR_FILE=27 ERR_BUFFER=1 ERR_COUNT=2 ERR_TAG=4 "
    "ERR_RANK=6 ERR_ROOT=7 ERR_TRUNCATE=14 ERR_IN_STATUS=17 ERR_PENDING=18 ERR_TOPOLOGY=10 "
    "ERR_DIMS=11 ERR_ARG=12 ERR_OTHER=15 ERR_UNKNOWN=13 ERR_INTERN=16 ERR_KEYVAL=48 "
    "ERR_NO_MEM=34 ERR_INFO_KEY=29 ERR_INFO_VALUE=30 ERR_INFO_NOKEY=31 ERR_SPAWN=42 ERR_PORT=38 "
    "ERR_SERVICE=41 ERR_NAME=33 ERR_PROC_ABORTED=76 ERR_BASE=46 ERR_SIZE=51 ERR_DISP=52 "
    "ERR_ASSERT=53 ERR_LOCKTYPE=47 ERR_RMA_CONFLICT=49 ERR_RMA_SYNC=50 ERR_RMA_RANGE=55 "
    "ERR_RMA_ATTACH=56 ERR_RMA_SHARED=57 ERR_RMA_FLAVOR=58 ERR_BAD_FILE=22 ERR_NO_SUCH_FILE=37 "
    "ERR_FILE_EXISTS=25 ERR_FILE_IN_USE=26 ERR_AMODE=21 ERR_ACCESS=20 ERR_READ_ONLY=40 "
    "ERR_NO_SPACE=36 ERR_QUOTA=39 ERR_NOT_SAME=35 ERR_IO=32 ERR_UNSUPPORTED_OPERATION=44 "
    "ERR_UNSUPPORTED_DATAREP=43 ERR_CONVERSION=23 ERR_DUP_DATAREP=24 ERR_VALUE_TOO_LARGE=77 "
    "ERR_REVOKED=78 ERR_PROC_FAILED=79 ERR_PROC_FAILED_PENDING=81 "
)
"""The error classes, by name."""

SUCCESS, UNDEFINED, KEYVAL_INVALID = 0, NUMBERS["UNDEFINED"], NUMBERS["KEYVAL_INVALID"]
ANY_SOURCE, ANY_TAG = NUMBERS["ANY_SOURCE"], NUMBERS["ANY_TAG"]
PROC_NULL, ROOT = NUMBERS["PROC_NULL"], NUMBERS["ROOT"]
ERR_LASTCODE = 0x3FFFFFFF
TAG_UB_VALUE = (1 << 30) - 1

_names = {number: name for name, number in ERRORS.items()}
# Classes and codes that the program has added: the class of each, and texts.
_added: dict[int, int] = {}
_texts: dict[int, str] = {}


def get_error_class(code: int) -> int:
    """Return the class of an error code."""
    if code == SUCCESS or code in _names:
        return code
    try:
        return _added[code]
    except KeyError:
        raise Exception(ERRORS["ERR_ARG"]) from None


@functools.total_ordering
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

    def __lt__(self, other: Any) -> bool:
        return self.ob_ierr < int(other)

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ob_ierr})"

    def __str__(self) -> str:
        return self.Get_error_string()

    def Get_error_code(self) -> int:
        """Return `error_code`."""
        return self.ob_ierr

    def Get_error_class(self) -> int:
        """Return `error_class`."""
        return get_error_class(self.ob_ierr)

    def Get_error_string(self) -> str:
        """Return `error_string`."""
        return self._text or get_error_string(self.ob_ierr)

    error_code, error_class = property(Get_error_code), property(Get_error_class)
    error_string = property(Get_error_string)


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


def exception_of(error: BaseException, call: str = "") -> BaseException:
    """Return MPI's exception for an error of unisono, with its text; other errors as they are.

    A mismatch names the calls of unisono that MPI's calls are made of, and so `call` before them.
    """
    if not isinstance(error, (UnisonoError, MemoryError)) or isinstance(error, NotImplementedError):
        return error
    name = next((name for kind, name in _CLASSES.items() if isinstance(error, kind)), "ERR_OTHER")
    # The launcher knows by the class or by this name whether another rank's end is the reason.
    kind = f"{type(error).__name__}: " if name == "ERR_OTHER" else ""
    if call and isinstance(error, CollectiveMismatchError):
        kind = f"in {call}: "
    made = Exception(ERRORS[name], f"MPI_{name}: {kind}{error}")
    made.__cause__ = error
    return made


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise MPI's exception for an error of unisono."""
    try:
        yield
    except (UnisonoError, MemoryError) as error:
        raise exception_of(error) from error


def get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if errorcode in _texts:
        return _texts[errorcode]
    if errorcode == SUCCESS:
        return "MPI_SUCCESS: no error"
    get_error_class(errorcode)
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
    kind, code = get_error_class(errorclass), _new_code()
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
