"""What every test relies on."""

import signal


def pytest_configure():
    """An interrupt interrupts, also where the whole run was started with `&`, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
