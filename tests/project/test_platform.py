"""Only unisono.core.platform, and a few files of C++, name what an operating system may lack."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src/unisono"
MODULES = {"fcntl", "pty", "resource", "termios", "tty"}
NAMES = {
    *("memfd_create", "pidfd_open", "pidfd_send_signal", "posix_fallocate", "waitid"),
    *("sched_getaffinity", "sched_setaffinity", "getrlimit", "getloadavg", "prctl"),
    *("process_vm_readv", "TCP_INFO", "AF_NETLINK", "SO_PEERCRED", "flock"),
}
FOLDERS = ("/proc/", "/sys/", "/dev/kmsg")
ALLOWED = {
    # Network namespaces: they are for Linux.
    "testing/hosts.py",
    "testing/switch.py",
    # It looks for names in the user's script.
    "launcher/workers/script_scan.py",
    # It runs in the worker's Python, which may have no unisono.
    "launcher/workers/warm_site/sitecustomize.py",
}


def others():
    files = (path for path in SOURCE.rglob("*.py") if "platform" not in path.parts)
    return [path for path in files if str(path.relative_to(SOURCE)) not in ALLOWED]


def facilities(tree):
    """Yield (line, name) for each facility that a module names."""
    texts = {
        id(body[0].value)
        for node in ast.walk(tree)
        if (body := getattr(node, "body", None)) and isinstance(body, list)
        if isinstance(body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, each.name) for each in node.names if each.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield line, node.module
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield line, node.attr
        elif isinstance(node, ast.Attribute) and node.attr == "platform":
            if isinstance(node.value, ast.Name) and node.value.id == "sys":
                yield line, "sys.platform"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text in NAMES or (id(node) not in texts and text.startswith(FOLDERS)):
                yield line, text


def test_no_other_package_names_a_facility():
    assert len(others()) > 300
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in others()
        for line, name in facilities(ast.parse(path.read_text()))
    ]
    assert not found, "move to unisono.core.platform:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import fcntl",
        "from termios import tcgetwinsize",
        "os.memfd_create('x')",
        "hasattr(os, 'pidfd_open')",
        "open(f'/proc/{pid}/stat')",
        "if sys.platform == 'linux': pass",
    ],
)
def test_a_facility_is_found(code):
    assert list(facilities(ast.parse(f'"""/proc/ in a docstring."""\n{code}')))


# The C++ engine is for Linux. For another system, change these files.
CPP = {
    "SYS_futex": {"core/futex.hpp"},
    "prctl": {"core/queue.cpp"},
    "sched_getcpu": {"core/cores.hpp"},
    "SYS_mbind": {"shared/numa.cpp"},
    "memfd_create": {"shared/segment.cpp", "messages/ring.cpp"},
    "pidfd_open": {"shared/process_handle.cpp"},
    "process_vm_readv": {"shared/remote_read.cpp"},
    "/proc/": {"shared/segment.cpp", "shared/remote_read.cpp", "messages/ring.cpp"},
    "TCP_INFO": {"store/link.cpp", "messages/wires.cpp"},
    "NETLINK_SOCK_DIAG": {"store/peer_uid.cpp"},
    "epoll_create1": {"store/server.cpp"},
    "eventfd": {"store/server.cpp"},
    "accept4": {"store/server.cpp"},
}
HEADERS = re.compile(r"#include <(?:linux/|sys/(?:epoll|eventfd|prctl|syscall)\.h)")


def test_few_files_of_cpp_name_a_facility():
    native = SOURCE.parents[1] / "native"
    found, included = {name: set() for name in CPP}, set()
    for path in (each for each in native.rglob("*.[ch]pp") if "tests" not in each.parts):
        file = path.relative_to(native).as_posix()
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        included |= {file} if HEADERS.search(text) else set()
        for name, files in found.items():
            files |= {file} if re.search(rf"(?<!\w){name}|_{name}\b", text) else set()
    assert found == CPP
    assert not included - set().union(*CPP.values())
