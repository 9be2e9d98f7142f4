"""The control plane: ZeroMQ sockets, CURVE keys, and messages as bytes."""
