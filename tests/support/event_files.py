"""The files that TensorBoard reads."""

import struct


def events(directory) -> list[tuple[str, int, float]]:
    """`(tag, step, value)` of all events.

    An event is preceded by its length (8 bytes) and a checksum (4), and followed by a checksum (4).
    """
    from tensorboardX.proto import event_pb2

    scalars = []
    for file in sorted(directory.glob("events*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            scalars += [
                (value.tag, event.step, value.simple_value) for value in event.summary.value
            ]
            data = data[16 + length :]
    return scalars
