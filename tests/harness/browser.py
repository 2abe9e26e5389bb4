"""A real headless browser, spoken to over a pipe in the Chrome DevTools Protocol."""

import json
import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The protocol's pipe is file 3 for what the browser reads and file 4 for what it writes.
TRAMPOLINE = """
import os, sys
reading, writing = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(reading, 3), os.dup2(writing, 4)
os.set_inheritable(3, True), os.set_inheritable(4, True)  # dup2 of a file onto itself does nothing
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser():
    """The path of an installed browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. ``requests``, ``console`` and ``exceptions`` hold what happened since ``open``."""

    def __init__(self, program, profile):
        their_reading, our_writing = os.pipe()
        our_reading, their_writing = os.pipe()
        browser = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        browser += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        ends = (their_reading, their_writing)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAMPOLINE, *map(str, ends), *browser],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self.writer = os.fdopen(our_writing, "wb", buffering=0)
        self.reader = os.fdopen(our_reading, "rb")
        self.number = 0
        self.session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.session = None
        self.call("Browser.close")
        self.process.wait(timeout=30)
        self.writer.close()
        self.reader.close()

    def call(self, method, **parameters):
        """Send one command and return its result; events met meanwhile are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path, width, height=900):
        """Load a local file in a window of that many CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def run(self, script):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    @property
    def requests(self):
        """The addresses that were asked for, without what stands in the page itself."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        addresses = [event["request"]["url"] for event in sent]
        return [address for address in addresses if not address.startswith("data:")]

    @property
    def complaints(self):
        """What stands in the console, exceptions and broken policies among it."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event["method"] in methods]

    def _read(self):
        data = bytearray()
        while not data.endswith(b"\0"):
            byte = self.reader.read(1)
            if not byte:
                raise RuntimeError("the browser closed its pipe")
            data += byte
        message = json.loads(data[:-1])
        if "method" in message:
            self.events.append(message)
        return message
