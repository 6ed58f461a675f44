"""An editor goes from a function to the code that prepares its call in three steps."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tools import ROOT

SOURCE = ROOT / "src/unisono"


class LanguageServer:
    """A language server over its standard streams."""

    def __init__(self):
        program = "from basedpyright.langserver import main; main()"
        command = [sys.executable, "-c", program, "--stdio"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, **pipes)
        self.asked = 0
        self.opened = set()
        folders = [{"uri": ROOT.as_uri(), "name": "unisono"}]
        given = {"processId": None, "rootUri": ROOT.as_uri(), "capabilities": {}}
        self.ask("initialize", **given, workspaceFolders=folders)
        self.tell("initialized")

    def send(self, **message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def tell(self, method, **params):
        self.send(method=method, params=params)

    def ask(self, method, **params):
        self.asked += 1
        self.send(id=self.asked, method=method, params=params)
        while True:
            size = 0
            while line := self.process.stdout.readline().strip():
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            message = json.loads(self.process.stdout.read(size))
            if "method" in message and "id" in message:  # a question of the server
                count = len(message["params"].get("items", ()))
                self.send(id=message["id"], result=[{}] * count or None)
            elif message.get("id") == self.asked:
                return message["result"]

    def definitions(self, path, text, at):
        """Return the (file, line) of what stands at a place of a text, the sources first."""
        uri = path.as_uri()
        if uri not in self.opened:
            self.opened.add(uri)
            document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
            self.tell("textDocument/didOpen", textDocument=document)
        before = text[:at]
        line, column = before.count("\n"), at - (before.rfind("\n") + 1)
        found = self.ask(
            "textDocument/definition",
            textDocument={"uri": uri},
            position={"line": line, "character": column},
        )
        places = [(each["uri"], each["range"]["start"]["line"]) for each in found or ()]
        files = [(Path(uri.removeprefix("file://")), number) for uri, number in places]
        return [place for place in files if place[0].suffix == ".py"]

    def close(self):
        self.ask("shutdown")
        self.tell("exit")
        self.process.communicate(timeout=60)


@pytest.fixture
def server():
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    server = LanguageServer()
    yield server
    server.close()


def step(server, path, number, call):
    """Follow the first match of `call` after a line."""
    text = path.read_text("utf-8")
    start = sum(len(line) + 1 for line in text.split("\n")[:number])
    at = re.compile(call).search(text, start).start(1)
    return server.definitions(path, text, at)[0]


@pytest.mark.whole("a language server reads the tree")
def test_a_function_leads_to_the_code_that_prepares_its_call(server):
    collectives = (SOURCE / "core/c10d/collectives.py").read_text("utf-8")
    names = re.findall(r"^def ([a-z]\w+)\(", collectives, re.MULTILINE)
    assert len(names) >= 16
    names.remove("gather_into_tensor")  # it calls the method `gather`
    text = "import unisono as dist\n" + "".join(f"dist.{name}\n" for name in names)
    script, ends = ROOT / "tests/project/not_there.py", {}
    for name in names:
        at = text.index(f"dist.{name}\n") + 5
        path, number = server.definitions(script, text, at)[0]
        assert path == SOURCE / "core/c10d/collectives.py"
        path, number = step(server, path, number, rf"pg\.({name})\(")
        assert path == SOURCE / "core/operations/methods.py"
        path, number = step(server, path, number, rf"\.({name})\(")
        ends[name] = path.relative_to(SOURCE).as_posix()
    assert ends.pop("barrier") == "core/backends/cpu.py"
    assert set(ends.values()) == {"core/backends/collectives.py"}


@pytest.mark.whole("a language server reads the tree")
def test_a_message_leads_to_the_code_that_prepares_it(server):
    calls = {
        "send": "send",
        "recv": "recv",
        "isend": "send",
        "irecv": "recv",
        "recv_array": "recv_array",
        "probe": "probe",
    }
    text = "import unisono as dist\n" + "".join(f"dist.{name}\n" for name in calls)
    script = ROOT / "tests/project/not_there.py"
    for name, method in calls.items():
        at = text.index(f"dist.{name}\n") + 5
        path, number = server.definitions(script, text, at)[0]
        assert path == SOURCE / "core/c10d/p2p.py"
        path, number = step(server, path, number, rf"pg\.({method})\(")
        assert path == SOURCE / "core/operations/methods.py"
        path, number = step(server, path, number, rf"\._on\(\w*\)\.({method})\(")
        assert path == SOURCE / "core/backends/p2p.py", name
