"""What all tests need of their process."""

import signal

# A shell lets its background jobs ignore Ctrl-C, and their children inherit that: tests that send it would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
