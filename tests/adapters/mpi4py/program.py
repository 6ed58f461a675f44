"""Every kind of call of `unisono.MPI`, against NumPy; run by `unisono run`."""

import sys

import numpy as np

from unisono import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
rows = np.arange(size * 3.0).reshape(size, 3) + 1  # row r is rank r's data
mine = rows[rank].copy()


def same(got, expected):
    np.testing.assert_allclose(got, expected)


def raised(call, *arguments):
    """Return the error of a call."""
    try:
        call(*arguments)
    except (MPI.Exception, NotImplementedError, BufferError, TypeError, ValueError) as error:
        return error
    raise AssertionError("no error")


def collectives():
    out = np.empty(3)
    comm.Allreduce(mine, out)
    same(out, rows.sum(0))
    comm.Allreduce([mine, 3, MPI.DOUBLE], [out, MPI.DOUBLE], MPI.PROD)
    same(out, rows.prod(0))
    comm.Scan(mine, out, MPI.MAX)
    same(out, rows[: rank + 1].max(0))
    out[:] = -1
    comm.Exscan(mine, out)
    same(out, rows[:rank].sum(0) if rank else [-1, -1, -1])
    table = np.empty((size, 3))
    request = comm.Iallgather(mine, table)
    request.Wait()
    same(table, rows)
    planned = comm.Bcast_init(out, root=size - 1)
    for value in (4.0, 5.0):
        out[:] = value if rank == size - 1 else 0
        planned.Start()
        planned.Wait()
        same(out, [value] * 3)
    planned.Free()
    counts = [r + 1 for r in range(size)]
    joined = np.empty(sum(counts))
    comm.Allgatherv(np.full(rank + 1, rank, "d"), [joined, counts, MPI.DOUBLE])
    same(joined, np.repeat(np.arange(size), counts))
    part = np.empty(1)
    comm.Reduce_scatter_block(np.arange(size, dtype="d"), part)
    same(part, [size * rank])
    pairs = np.array([(10.0 - rank, rank)], [("value", "d"), ("index", "i")])
    kind = MPI.DOUBLE_INT
    raw = np.zeros(kind.extent, np.uint8)
    raw[:8], raw[8:12] = pairs["value"].view(np.uint8), pairs["index"].view(np.uint8)
    best = np.zeros_like(raw)
    comm.Allreduce([raw, 1, kind], [best, 1, kind], MPI.MINLOC)
    assert (best[:8].view("d")[0], best[8:12].view("i")[0]) == (11.0 - size, size - 1)
    assert comm.allreduce(rank, MPI.SUM) == size * (size - 1) // 2
    assert comm.alltoall([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    assert comm.scan(1) == rank + 1


def messages():
    # In order with tags, from any source, and a synchronous one that is not done too early.
    if rank == 0:
        for _ in range(1, size):
            status = MPI.Status()
            comm.Recv(np.empty(4), MPI.ANY_SOURCE, 7, status)
            assert status.Get_count(MPI.DOUBLE) == 2
            assert status.source in range(1, size)
    else:
        comm.Send(np.full(2, rank, "d"), 0, 7)
    sent = comm.Issend(mine, right, 3)
    assert not sent.Test()
    comm.Barrier()
    got = np.empty(3)
    comm.Recv(got, left, 3)
    sent.Wait()
    same(got, rows[left])
    sent = comm.issend({"from": rank}, right, 4)
    assert comm.mprobe(left, 4).recv() == {"from": left}
    sent.wait()
    # The receiver does something else after Irecv, and the answer comes in any case.
    request = comm.Irecv(got, left, 5)
    comm.Ssend(mine * 2, right, 5)
    comm.Barrier()
    request.Wait()
    same(got, rows[left] * 2)
    column = MPI.DOUBLE.Create_vector(3, 1, size).Commit()
    grid = np.zeros((3, size))
    grid[:, 0] = mine
    comm.Sendrecv([grid, 1, column], right, 1, got, left, 1)
    same(got, rows[left])
    comm.Isend(np.ones(5), rank, 6)
    assert raised(comm.Recv, np.empty(2), rank, 6).Get_error_class() == MPI.ERR_TRUNCATE
    for wanted in (rank, MPI.ANY_SOURCE):
        request = comm.Issend(mine, rank, 6)
        assert not request.Test()
        error = raised(comm.Recv, np.empty(2), wanted, 6)
        assert error.Get_error_class() == MPI.ERR_TRUNCATE
        request.Wait()
    assert raised(comm.Send, mine, size).error_class == MPI.ERR_RANK
    assert raised(MPI.COMM_NULL.Get_size).error_class == MPI.ERR_COMM


def plain_reductions():
    """C++ runs the second call of a kind; each has the values and errors of the first one."""
    for count in (1, 1000, 200_000):  # the longest is copied by NumPy
        source, out = np.full(count, rank + 1.0), np.empty(count)
        for k in range(3):
            out[:] = -1
            source += k
            comm.Allreduce(source, out)
            same(out, np.full(count, sum(source[0] - rank + r for r in range(size))))
            same(source, np.full(count, source[0]))
            comm.Allreduce(MPI.IN_PLACE, out, MPI.MAX)
            same(out, np.full(count, sum(source[0] - rank + r for r in range(size))))
    square = np.arange(4.0).reshape(2, 2) + rank
    flat = np.empty(4)
    out = np.empty((2, 2), order="F")
    for _ in range(3):
        comm.Allreduce(square, flat)  # another shape: the memory counts
        same(flat, size * np.arange(4.0) + sum(range(size)))
        comm.Allreduce(square, out)  # another order, too
        same(out.T.reshape(-1), flat)
        comm.Allreduce(square.T, out)
        same(out.T.reshape(-1), flat)
        for sent, into in ((square[0].astype("f"), flat[:2]), (square[0], flat[:3])):
            assert isinstance(raised(comm.Allreduce, sent, into), ValueError)
        for sent, into in ((square[:, 0], flat[:2]), (MPI.IN_PLACE, flat[::2])):
            assert isinstance(raised(comm.Allreduce, sent, into), ValueError)
        assert raised(comm.Allreduce, square, flat, MPI.BXOR).error_class == MPI.ERR_OP
    overlapping = np.arange(5.0)
    comm.Allreduce(overlapping[:4], overlapping[1:])
    same(overlapping, [0, *(size * np.arange(4.0))])


def planned_arguments():
    """A persistent call checks its arguments when it is made, and moves and writes nothing."""
    out = np.full(3, -1.0)
    for call, name in (
        (lambda: comm.Send_init(mine, size), "ERR_RANK"),
        (lambda: comm.Ssend_init(mine, right, -5), "ERR_TAG"),
        (lambda: comm.Recv_init(out, -7), "ERR_RANK"),
        (lambda: comm.Recv_init(out, left, -5), "ERR_TAG"),
        (lambda: comm.Bcast_init(out, size), "ERR_ROOT"),
        (lambda: comm.Reduce_init(mine, out, root=-9), "ERR_ROOT"),
    ):
        assert raised(call).error_class == getattr(MPI, name), name
    for call, kind in (
        (lambda: comm.Send_init(object(), right), TypeError),
        (lambda: comm.Recv_init(bytes(8), left), BufferError),
        (lambda: comm.Send_init([mine, -1, MPI.DOUBLE], right), ValueError),
        (lambda: comm.Allreduce_init(mine, out[:2]), ValueError),
        (
            lambda: comm.Gatherv_init(mine, [np.empty(9), [1] * (size + 1), MPI.DOUBLE], rank),
            ValueError,
        ),
    ):
        assert isinstance(raised(call), kind), kind
    planned = [
        comm.Allreduce_init(mine, out),
        comm.Reduce_scatter_init(np.arange(size * 1.0), np.empty(1)),
        comm.Recv_init(out, left, 9),
    ]
    same(out, [-1.0] * 3)
    planned[0].Start()
    planned[0].Wait()
    same(out, rows.sum(0))


def arguments_of_forms():
    for call in (
        lambda: comm.Irecv(mine.copy(), left, 8, status=MPI.Status()),
        lambda: comm.Irecv(mine.copy(), left, 8, MPI.Status()),
        lambda: comm.Recv_init(mine.copy(), left, 8, status=MPI.Status()),
        lambda: comm.Send_init(mine, destt=right),
        lambda: comm.Bcast_init(mine, 0, 0),
        lambda: comm.Send(mine, right, 8, mode="s"),
        lambda: comm.isend(mine, right, 8, mode="b"),
    ):
        assert isinstance(raised(call), TypeError)
    message, out, status = [rows, 2, MPI.DOUBLE], np.zeros(3), MPI.Status()
    planned = comm.Send_init(message, right, 8)
    message[1] = 3
    received = comm.Irecv(out, left, 8)
    planned.Start()
    received.Wait(status)
    planned.Wait()
    assert status.Get_count(MPI.DOUBLE) == 2


def refused_messages():
    """A send that is refused leaves no receive, which would take the next message."""
    into = np.zeros(2)
    for bad in (np.zeros(4)[::2], object()):
        try:
            comm.Sendrecv(bad, right, 5, into, left, 5)
        except (TypeError, ValueError):
            continue
        raise AssertionError("no error")
    comm.Sendrecv(np.full(2, rank, "d"), right, 5, into, left, 5)
    same(into, [left] * 2)
    comm.barrier()
    assert not comm.Iprobe(left, 6)
    assert comm.Improbe(left, 6) is None


def communicators():
    half = comm.Split(rank % 2, -rank)
    assert half.size == len(range(rank % 2, size, 2))
    assert half.allgather(rank) == sorted(range(rank % 2, size, 2), reverse=True)
    half.Free()
    assert half == MPI.COMM_NULL
    cart = comm.Create_cart([size], periods=[True])
    around = np.empty(2)
    cart.Neighbor_allgather(np.array([float(rank)]), around)
    same(around, [left, right])
    cart.Free()
    if size > 1:
        side = comm.Split(int(rank > 0), rank)
        other = side.Create_intercomm(0, comm, 1 if rank == 0 else 0)
        assert sorted(other.allgather(rank)) == ([*range(1, size)] if rank == 0 else [0])
        both = other.Merge(high=rank > 0)
        assert both.allgather(rank) == list(range(size))
        for root in range(size - 1):
            # The others of the root's side take no part; their next call must not differ by that.
            to = root if rank == 0 else MPI.ROOT if side.rank == root else MPI.PROC_NULL
            assert other.gather(rank, to) == ([0] if to == MPI.ROOT else None)
            assert len(other.allgather(root)) == other.Get_remote_size()
        if rank == 0:
            for value in (1.0, 2.0):
                other.Bcast(np.full(4, value), MPI.ROOT)
        else:  # a refused call counts, so that the next one gets its own data
            raised(other.Bcast, b"abc", 0)
            out = np.empty(4)
            other.Bcast(out, 0)
            same(out, [2.0] * 4)
        for each in (both, other, side):
            each.Free()


def windows():
    window = MPI.Win.Allocate(8, 1, comm=comm)
    memoryview(window)[:4] = bytes([rank + 1] * 4)
    assert window != MPI.WIN_NULL
    assert window.tomemory()[3] == rank + 1
    window.Free()
    win = MPI.Win.Allocate(8 * size, 8, comm=comm)
    win.Fence()
    win.Put(np.array([float(rank)]), right, rank)
    win.Fence()
    assert np.frombuffer(win.tomemory(), "d")[left] == left
    comm.Barrier()
    win.Lock(0)
    win.Accumulate(np.ones(1), 0, size - 1)
    win.Unlock(0)
    comm.Barrier()
    found = np.empty(1)
    win.Lock(0, MPI.LOCK_SHARED)
    win.Get(found, 0, size - 1)
    win.Unlock(0)
    assert found[0] == size + (size - 1 if size > 1 else 0)
    win.Free()
    memory = np.zeros(2, "i")
    win = MPI.Win.Create(memory, 4, comm=comm)
    win.Fence()
    win.Put(np.array([rank + 1], "i"), right, 1)
    win.Fence()
    assert memory.tolist() == [0, left + 1]
    win.Free()


def files(path):
    mode = MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE
    file = MPI.File.Open(comm, path, mode)
    kind = MPI.DOUBLE.Create_subarray([size, 3], [1, 3], [rank, 0]).Commit()
    file.Set_view(0, MPI.DOUBLE, kind)
    file.Write_all(mine)
    file.Sync()
    file.Set_view(0, MPI.DOUBLE)
    table = np.empty((size, 3))
    file.Read_at_all(0, table)
    same(table, rows)
    part, status = np.empty(3), MPI.Status()
    file.Read_at_all_begin(3 * rank, part)
    file.Read_at_all_end(part, status)
    same(part, mine)
    assert status.Get_count(MPI.DOUBLE) == 3
    file.Seek_shared(0)
    part[:] = 0
    file.Read_ordered(part, status)
    same(part, mine)
    file.Iread_at(3 * right, part).Wait(status)
    same(part, rows[right])
    file.Read_at(3 * (size - 1) + 1, part, status)  # the end of the file comes first
    assert status.Get_count(MPI.DOUBLE) == 2
    assert isinstance(raised(file.Iread_at, 0, part, status), TypeError)
    file.Close()


def refusals():
    text = str(raised(comm.Spawn, "program"))
    assert text.startswith("unisono.MPI has no Intracomm.Spawn: ranks are started by")


collectives()
plain_reductions()
messages()
planned_arguments()
arguments_of_forms()
refused_messages()
communicators()
windows()
files(sys.argv[1])
refusals()
print("done")
