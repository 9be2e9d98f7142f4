"""The rules S1-S8 as sans-IO state machines: events in, actions out, time and randomness passed in.

Nothing here owns a socket, a thread, a clock or a source of randomness, so the endpoints, the simulator and the tests
all drive the same code.
"""
