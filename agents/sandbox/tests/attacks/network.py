"""Reaches for anything that listens."""
import os
import socket

port = int(os.environ["PORT"])
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
    (socket.AF_INET, socket.SOCK_RAW, None),
    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)),
    (socket.AF_NETLINK, socket.SOCK_RAW, None),
    (socket.AF_PACKET, socket.SOCK_RAW, None),
    (getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM, None),
    (getattr(socket, "AF_ALG", 38), socket.SOCK_SEQPACKET, None),
):
    try:
        with socket.socket(family, kind) as opened:
            print("ESCAPED: a socket of", family, kind)
            if address:
                opened.settimeout(2)
                opened.connect(address)
                opened.send(b"reached")
                print("ESCAPED: reached", address)
    except OSError:
        pass
