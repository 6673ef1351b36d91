"""Client of warm processes (tests.helpers.warm), and source of the stand-in for the interpreter.

The stand-in starts often, so this imports only built-in modules.
"""

import _socket
import _struct
import marshal
import os
import sys

_LENGTH = _struct.Struct("=Q")
_NUMBER = _struct.Struct("=q")
_OPTIONS = {"-u": 1, "-W": 2}  # interpreter options, with their number of words
_MOST_DESCRIPTORS = 250  # per message; SCM_MAX_FD is 253


def ask(connection, request, descriptors):
    """Request a process like this one. ``descriptors``: our descriptors by their numbers there."""
    ignored = 0
    with open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("SigIgn:"):
                ignored = int(line.split()[1], 16)
    umask = os.umask(0)
    os.umask(umask)
    request = {"cwd": os.getcwd(), "umask": umask, "ignored": ignored, "numbers": list(descriptors), **request}
    data = marshal.dumps(request)
    rights = b"".join(_struct.pack("=i", descriptor) for descriptor in descriptors.values())
    connection.sendmsg([_LENGTH.pack(len(data))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    connection.sendall(data)


def receive(connection):
    """Server side of ``ask``: the request, and descriptors here by their numbers in the new process."""
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, _socket.CMSG_LEN(4 * _MOST_DESCRIPTORS))
    received = [_struct.unpack_from("=i", data, at)[0] for _, _, data in ancillary for at in range(0, len(data), 4)]
    request = marshal.loads(_read(connection, _LENGTH.unpack(head)[0]))
    return request, dict(zip(request["numbers"], received, strict=True))


def write_number(connection, number):
    connection.sendall(_NUMBER.pack(number))


def read_number(connection):
    return _NUMBER.unpack(_read(connection, _NUMBER.size))[0]


def _read(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(min(size - len(data), 1 << 20))
        if not more:
            raise ConnectionError("the warm process is gone")
        data += more
    return data


def main(python, folder, kinds, fixed):
    """Program of the stand-in: fork ``-m MODULE`` from a warm process if there is one, else execute the interpreter."""
    module, arguments = _module(sys.orig_argv[3:])  # after "python -IS FILE"
    same = all(os.environ.get(name, value) == value for name, value in fixed.items())
    heavy = "heavy-0" in kinds.get(module, ())
    if module not in kinds or (heavy and not (same and set(fixed) <= set(os.environ))):
        os.execv(python, [python, *sys.orig_argv[3:]])
    sockets = kinds[module]
    connection = _socket.socket(_socket.AF_UNIX)
    try:
        connection.connect(folder + "/" + sockets[os.getpid() % len(sockets)])
    except OSError:  # that process was never started
        os.execv(python, [python, *sys.orig_argv[3:]])
    descriptors = {int(name): int(name) for name in os.listdir("/proc/self/fd")}
    descriptors = {number: number for number in descriptors if number != connection.fileno() and _is_open(number)}
    ask(connection, {"module": module, "arguments": arguments, "environ": dict(os.environ)}, descriptors)
    child = read_number(connection)
    _forward_signals(child)
    code = read_number(connection)
    if code < 0:
        import _signal

        _signal.signal(-code, _signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _module(arguments):
    """(module of ``-m``, its arguments), after options without effect here; None: another kind of call."""
    while arguments and arguments[0] in _OPTIONS:
        arguments = arguments[_OPTIONS[arguments[0]] :]
    return (arguments[1], arguments[2:]) if arguments[:1] == ["-m"] else (None, [])


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:  # the directory listing itself
        return False
    return True


def _forward_signals(child):
    import _signal

    def forward(signum, frame):
        try:  # noqa: SIM105 - importing contextlib would dominate the stand-in's time
            os.kill(child, signum)
        except ProcessLookupError:
            pass

    for signum in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGQUIT):
        if _signal.getsignal(signum) != _signal.SIG_IGN:
            _signal.signal(signum, forward)
