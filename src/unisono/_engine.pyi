"""The native engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import overload

def dtype_codes() -> dict[str, int]:
    """Return every element type's code, by Python's name of it."""

def reduce(into: int, other: int, count: int, dtype: int, op: int) -> None:
    """Set into = into (op) other, element by element; pointers and codes."""

def encode(codec: int, values: int, scales: int, codes: int, count: int) -> None:
    """Set scales and codes of float32; pointers."""

def decode(codec: int, scales: int, codes: int, values: int, count: int, adds: bool) -> None:
    """Set float32 values to those of codes, or add those to them; pointers."""

def isa() -> str:
    """Return the name of the chosen instruction set."""

def isas() -> list[str]:
    """Return the instruction sets that this machine has, from slowest."""

def set_isa(name: str) -> None:
    """Choose an instruction set."""

def let_threads_move(is_allowed: bool) -> None:
    """Choose whether a waiting thread may leave its core to a rank."""

ABI: int = 9

BUILD: str = "gcc 12.2.0"

OK: int = 0

MISMATCH: int = 1

TIMEOUT: int = 2

LOST: int = 3

LEFT: int = 7

ABORTED: int = 4

NO_MEMORY: int = 9

UNEVEN: int = 8

WAITING: int = 17

LIBRARY: int = 18

class Segment:
    @staticmethod
    def create(ranks: int, slot_bytes: int, nonce: bytes) -> tuple[int, Segment]:
        """Make shared memory; return (errno or 0, segment)."""

    @staticmethod
    def attach(pid: int, fd: int, nonce: bytes) -> tuple[int, Segment]:
        """Map what another process made; return (errno or 0, segment)."""

    def place_slots(self, rank: int, node: int) -> None:
        """Ask for the pages of a rank's slots from a NUMA node; -1: leave them."""

    def fd(self) -> int: ...
    def close_fd(self) -> None: ...

class Program:
    def __init__(
        self, steps: int, step_count: int, loops: int, loop_count: int, scratch_count: int
    ) -> None: ...

class ThreadTeam:
    def __init__(self, threads: int) -> None:
        """Threads, with the caller's, that share loops."""

    def close(self) -> None:
        """End the threads."""

class Runner:
    def set_late(self, late: Callable[[], None], before_ns: int) -> None:
        """Call `late` once when a call nears its deadline."""

    def set_recorder(self, recorder: Recorder) -> None:
        """Record for which ranks its calls wait."""

    def set_team(self, team: ThreadTeam) -> None:
        """Share the loops of large calls among threads."""

    def abort(self) -> None:
        """End every wait."""

class Group(Runner):
    def __init__(self, segment: Segment, rank: int, pids: Sequence[int], crowded: bool) -> None: ...
    def fail(self, by: int) -> None:
        """End every wait for what that rank of the group has not finished."""

    def leave(self) -> None:
        """Mark this rank as gone, for the other ranks."""

def fits(stub: bytes) -> bool:
    """Whether the module was built for this text of its stub."""

def why_no_openssl() -> str:
    """Return why there is no TLS here; empty: there is."""

class TlsContext:
    @overload
    def __init__(self) -> None:
        """For keys that both ends know."""

    @overload
    def __init__(self, certificate: str, key: str, authority: str) -> None:
        """For certificates: files."""

class TlsSession:
    def __init__(
        self,
        context: TlsContext,
        fd: int,
        is_server: bool,
        secrets: Sequence[tuple[str, bytes]],
        name: str,
    ) -> None: ...
    def read(self, into: object) -> int:
        """Receive bytes after the handshake; return how many, 0 at the end."""

    def write(self, head: object, rest: object) -> int:
        """Take bytes of both after the handshake; return how many."""

    @property
    def has_unsent(self) -> bool: ...
    @property
    def has_unread(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_other_secret(self) -> bool: ...
    @property
    def secret_name(self) -> str: ...
    @property
    def first_byte(self) -> int: ...

class StoreServer:
    def __init__(
        self,
        listeners: Sequence[int],
        log_fd: int,
        token: bytes,
        serves_strangers: bool,
        max_reply_bytes: int,
        max_greetings: int,
        log_window_ns: int,
        tls: tuple[int, TlsContext, Sequence[tuple[str, bytes]]],
    ) -> None:
        """Serve torch's TCPStore protocol on a thread of its own."""

    def stop(self) -> None:
        """End the thread and close every socket."""

    @property
    def clients(self) -> int: ...

class StoreLink:
    def __init__(self, fd: int, silence_s: float, tls: TlsSession | None = None) -> None: ...
    def exchange(self, timeout_s: float, requests: tuple[object, ...]) -> list[object]:
        """Send requests, (op, argument, ...) each, and return their results."""

    def cancel(self, timeout_s: float) -> bool:
        """End a wait that timed out; return whether it was over by then."""

class Recorder:
    def __init__(self, ranks: int) -> None: ...
    def begin(self, kind: int, seq: int, word: int, count: int, peer: int) -> int:
        """Begin a record of a call of the calling thread; return its number."""

    def start(self, number: int) -> None: ...
    def note_wait(self, number: int) -> None: ...
    def end(self, number: int, outcome: int) -> None: ...
    def end_message(self, number: int, outcome: int, peer: int) -> None: ...
    def count_message(self) -> int:
        """Return the number for the next message."""

    def begin_wait(self, rank: int) -> None:
        """Begin a wait of the collective that runs."""

    def end_wait(self) -> None:
        """End the wait, if one was begun."""

    def snapshot(self) -> bytes:
        """Return the bytes of the ring."""

    def totals(self) -> bytes:
        """Return the bytes of the totals by kind."""

    def waited(self) -> list[int]:
        """Return the ticks that this rank has waited for each rank, up to now."""

    @property
    def waiting_for(self) -> int:
        """The rank for which the running collective waits; -1: none."""

    @property
    def last(self) -> int:
        """Number of the last record."""

def ticks() -> tuple[int, int]:
    """Return the time in ticks and on the monotonic clock."""

def code_of(number: int) -> object:
    """Return the code object of a site, or None."""

def add_own_folder(folder: str) -> None:
    """Skip the frames of a library when the site of a call is found."""

class QueuedCall:
    @overload
    def __init__(self) -> None:
        """A call that Python runs when it has the turn."""

    @overload
    def __init__(
        self,
        prepared: Prepared,
        input: object | None,
        output: object | None,
        timeout_s: float,
        recorder: object | None,
    ) -> None:
        """A prepared call with its memory."""

    @property
    def record(self) -> int:
        """The number of its record; 0: Python records it."""

    @property
    def memory(self) -> tuple[object, object]:
        """Input and output."""

    def write_back(self) -> None:
        """Copy results from the copies of C++."""

    @property
    def result(self) -> object:
        """The output of a call that C++ has queued."""

    @property
    def timeout_s(self) -> float:
        """The whole time-out."""

    @property
    def left_s(self) -> float:
        """Seconds until its deadline, which may be negative."""

    @property
    def seq(self) -> int:
        """Its number; 0 before it is queued."""

    @property
    def is_handed(self) -> bool:
        """Once it is over: whether serve() reports its end."""

class CallQueue:
    def __init__(self) -> None: ...

    CLOSED: int = 0

    IDLE: int = 1

    FOREIGN: int = 2

    FAILED: int = 3

    ENDED: int = 4

    def take(self) -> int:
        """Take the turn and return the next number; 0 if it is not free."""

    def give(self) -> None:
        """Give the turn back."""

    def is_free(self) -> bool: ...
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""

    def runs(self) -> bool:
        """Whether a call runs."""

    def push(self, call: QueuedCall) -> int:
        """Queue a call, to be kept until its end; return its number, or 0."""

    def serve(self) -> tuple[int, int, int, int]:
        """Run queued calls; return (reason, number, code, peer)."""

    def finish(self, seq: int) -> None:
        """End the call with which serve() returned."""

    def is_over(self, seq: int) -> bool: ...
    def watch(self, call: QueuedCall) -> bool:
        """Have serve() report its end; False: it has ended well already."""

    def wait(self, seq: int, timeout_s: float) -> bool:
        """Wait until a call is over; return whether it is."""

    def wait_until_still(self, timeout_s: float) -> bool:
        """Wait until no call runs."""

    def close(self) -> int:
        """Drop the calls that have not begun; return the first number, or 0."""

    @property
    def last(self) -> int:
        """Number of the last call, queued or not."""

    @property
    def begun(self) -> int:
        """Number of the last queued call that began."""

class Prepared:
    def __init__(
        self,
        runner: Runner,
        program: Program,
        itemsize: int,
        dtype: int,
        op: int,
        fingerprint: int,
        even: int,
        kind: int = 0,
        count: int = 0,
        members: int = 1,
        copies: bool = False,
        factor: float = 1.0,
    ) -> None:
        """A call without its memory; fingerprint 0: the ranks have agreed."""

class Calls:
    def __init__(self, queue: object, continues: object) -> None: ...
    def close(self) -> None:
        """Pass every call to Python from now on."""

    @property
    def caller(self) -> int:
        """The thread that is in a collective call, or 0."""

    @caller.setter
    def caller(self, arg: int, /) -> None: ...
    def set_timeout(self, timeout_s: float) -> None: ...
    def set_recorder(self, recorder: Recorder) -> None:
        """Record calls from now on."""

    def open_queue(
        self, engine: object, type: object, calls: object, discards: object, is_locked: object
    ) -> None:
        """Queue asynchronous calls from now on."""

    def wait_well(self, call: QueuedCall) -> bool:
        """Wait for a queued call; False: it has failed, or Python must wait."""

    def set_resized(self, resized: object) -> None:
        """Have `resized(call, shape)` make the prepared calls of new shapes."""

    def set_messenger(
        self, messenger: object | None, failed: object, receives: object, sent: object
    ) -> None:
        """Send and receive plain messages through a Port."""

    def run(
        self,
        prepared: Prepared,
        input: object | None,
        output: object | None,
        timeout_s: float,
        seq: int,
    ) -> tuple[int, int]:
        """Run a call on this thread, which has the turn; return (code, peer)."""

    def last(self) -> object:
        """Return (seq, call) of the last call without Python, or None."""

class Learner:
    def __call__(self, found: object | None) -> None:
        """Keep what `Engine.prepare` has returned for the call."""

def make_function(function: object, names: Sequence[str], kinds: str, positional: int) -> object:
    """Return a callable that passes only some calls to `function`."""

def set_world(world: object, stream: object, group_type: object, work_type: object) -> None: ...
def set_default(group: object | None) -> None: ...
def array_of(tensor: object) -> object:
    """Return an array over a plain torch tensor, or None."""

def track(call: object) -> None:
    """Have the garbage collector visit a queued call that C++ made."""

def mark_worker() -> None:
    """Mark the calling thread as one of unisono's own."""

def suspend_calls() -> None:
    """Pass every call to Python."""

def resume_calls() -> None:
    """Undo one suspend_calls()."""

CLOSED: int = 12

CANCELLED: int = 13

UNREACHABLE: int = 14

UNKNOWN: int = 15

class Messages:
    def __init__(self, rank: int, ranks: int) -> None: ...
    def create(self, nonce: bytes, node: int) -> int:
        """Make the inbox, on a NUMA node or -1; return its fd or -errno."""

    def introduce(
        self, addresses: Sequence[tuple[int, int, bytes, int]], crowded: bool, far: bool
    ) -> None:
        """Set the addresses of inboxes: (pid, fd, nonce, channels); pid 0: none."""

    def has_left(self, peer: int) -> bool: ...
    def set_stuck(self, stuck: Callable[[Sequence[int], bool, int], None]) -> None: ...
    def set_wire(self, wire: Callable[[int, int, int], None]) -> None:
        """Set a function of (rank, channel, 0: make; 1: ended; 2: was changed)."""

    def add_wire(self, peer: int, channel: int, fd: int, tls: TlsSession | None = None) -> None:
        """Take over a connected socket."""

    def attend(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def close_in_child(self) -> None: ...
    def start_send(
        self, to: int, context: int, tag: int, info: int, data: object
    ) -> tuple[int, int, int, int, int, int, object]:
        """Return (number, code, source, nbytes, info, tag, message or None)."""

    def start_recv(
        self,
        from_: int,
        context: int,
        tag: int,
        info: int,
        into: object,
        among: Sequence[int],
        takes: int = 0,
    ) -> tuple[int, int, int, int, int, int, object]: ...
    def watch(self, number: int) -> None:
        """Have serve() complete a receive."""

    def wait(
        self,
        number: int,
        timeout_s: float,
        outcomes: list[tuple[int, int, int, int, int, int, object]],
    ) -> int:
        """Return a code; append the outcome of what has ended."""

    def cancel(
        self, number: int, outcomes: list[tuple[int, int, int, int, int, int, object]]
    ) -> int:
        """As wait()."""

    def has_receive(self, from_: int, context: int, tag: int) -> bool:
        """Whether a receive from this rank waits."""

    def number_of(self, into: object, after: int = 0) -> int:
        """Return the last receive into this memory after that number; 0: none."""

    def last_number(self) -> int:
        """Number of the last started operation."""

    def serve(self) -> list[tuple[int, int, int, int, int, int, object]]:
        """Return outcomes; nothing after close()."""

    def peer_down(self, peer: int, left: bool) -> bool: ...
    def fail_context(self, context: int, after: int = 0) -> None: ...
    def forget_context(self, context: int) -> None: ...
    def close(self, timeout_s: float) -> list[int]:
        """Return the sockets, to be read until they end."""

class Messenger:
    pass

class Port(Messenger):
    def __init__(
        self,
        messages: Messages,
        context: int,
        ranks: Sequence[int],
        type: object,
        words: Mapping[str, int],
        open: object,
    ) -> None: ...
    def set_recorder(self, recorder: Recorder, kinds: Mapping[str, tuple[int, int]]) -> None:
        """Record messages from now on."""

class Receive:
    @property
    def array(self) -> object:
        """The memory."""

    @property
    def owner(self) -> object:
        """The caller's argument."""

    @property
    def peer(self) -> object:
        """Global rank; None for any."""

    @property
    def tag(self) -> object: ...
    @property
    def number(self) -> int:
        """As of Messages.start_recv."""

    @property
    def is_forked(self) -> bool:
        """Whether a parent of this process started it."""

    @property
    def timeout_s(self) -> float:
        """The whole time-out."""

    @property
    def left_s(self) -> float:
        """Seconds until its deadline, which may be negative."""

    def wait_well(self) -> bool:
        """Wait for the end; False: it has failed, or `pending` must wait."""

    def has_ended_well(self) -> bool:
        """False: `pending` knows."""

    def pending(self, output: object | None) -> object:
        """Return its Message."""

    def on_end(self, callback: object) -> bool:
        """False: `pending` must have the callback."""

class MPICall:
    def __init__(
        self,
        function: int,
        arguments: Sequence[int],
        input_at: int,
        output_at: int,
        request_at: int,
        kept: object | None,
    ) -> None:
        """A function's address and its arguments. Keeps `kept`."""

    @property
    def ends_together(self) -> bool:
        """Whether the call ends when it has ended on all ranks."""

    @ends_together.setter
    def ends_together(self, arg: bool, /) -> None: ...

class MPIDoubling:
    def __init__(
        self, send: MPICall, receive: MPICall, reduce: MPICall, rank: int, ranks: int, nbytes: int
    ) -> None:
        """An all_reduce of messages."""

class SharedAgreement:
    def __init__(self, segment: Segment, rank: int, probe: MPICall) -> None:
        """The agreement of one group, in shared memory."""

class MPIGroup:
    def __init__(
        self, test: int, agreement: MPICall, crowded: bool, shared: SharedAgreement | None
    ) -> None: ...
    def go_on(self) -> tuple[int, int]:
        """Wait for the call that returned WAITING; return (code, MPI's error)."""

    def is_moving(self) -> bool:
        """Whether MPI has the arrays of the call."""

    def give_up(self) -> bool:
        """Give MPI no array any more; return whether MPI has them already."""

    def is_under_way(self) -> bool:
        """Whether a call has begun and not ended: MPI may have memory of it."""

    def has_arrived(self) -> bool:
        """Whether the data are there, and go_on() ends a call that took long."""

    def is_in_mpi(self) -> bool:
        """Whether the thread for calls is in MPI."""

    def finished(self) -> int:
        """Return the number of calls that have ended here."""

    def abort(self) -> None:
        """Pass the next calls to Python."""

    def close(self) -> None:
        """End the thread for calls, if it is not in MPI."""

class MPIRunner(Runner):
    @overload
    def __init__(self, group: MPIGroup, call: MPICall) -> None:
        """Makes one kind of call."""

    @overload
    def __init__(self, group: MPIGroup, doubling: MPIDoubling) -> None:
        """Makes all_reduces of messages."""

def mpi_op(dtype: int, op: int) -> int:
    """Return a function for MPI_Op_create; 0: the pair has no meaning."""

class WindowPart:
    def __init__(self, lines: object, data: object, dtype: int) -> None: ...
    def put(self, array: object, offset: int) -> bool:
        """Copy an array in; return False if Python must look at it."""

    def put_now(self, array: object, offset: object) -> bool:
        """As `put`, and record the call."""

    def get_now(self, array: object, offset: object) -> bool:
        """As `get`, and record the call."""

    def fetch_add_now(self, value: object, offset: object) -> int | None:
        """Add to an int64 and record it; None: Python must do it."""

    def signal_now(self, source: int) -> bool:
        """Signal and record the call; False if the part is closed."""

    def set_recorder(self, recorder: Recorder, owner: int, kinds: Sequence[int]) -> None: ...
    def get(self, array: object, offset: int) -> bool:
        """Copy elements into an array; return False as `put` does."""

    def apply(self, array: object, old: object | None, offset: int, op: int) -> bool:
        """Combine elements with an array's, atomically; False as `put`."""

    def compare_and_swap(self, expected: object, desired: object, offset: int) -> bool:
        """Set an expected element; `expected` becomes what it was."""

    def signal(self, source: int) -> None: ...
    def signals(self, source: int) -> int: ...
    def wait_signal(self, source: int, taken: int, timeout_s: float, crowded: bool) -> int:
        """Wait for more signals than `taken`; return their number."""

    def wait_now(self, source: int, taken: int, timeout_s: float, crowded: bool) -> int:
        """As `wait_signal`, and record the call."""

    def close(self) -> None: ...
    def is_closed(self) -> bool: ...

class Steps(Runner):
    def __init__(
        self,
        messages: Messages,
        context: int,
        ranks: Sequence[int],
        hosts: Sequence[int],
        agreement: Group | None,
    ) -> None: ...
    def finished(self) -> int:
        """Return the number of the last finished run."""
