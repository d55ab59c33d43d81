"""Headless browsers with the standard library only: a common base, and Chromium over its debugging pipe."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time


class Navigated(RuntimeError):
    """The page was left while a script ran in it."""


class Browser:
    """A page in a separate browser, which a subclass drives. `problems` has the errors that the browser reported."""

    def until(self, expression, seconds=60):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value_if_there(expression):
            if time.monotonic() > end:
                raise RuntimeError(f"not within {seconds} s: {expression}\n{self.value('document.body.innerText')}")
            time.sleep(0.05)

    def value_if_there(self, expression):
        try:
            return self.value(expression)
        except Navigated:
            return None

    def open(self, url):
        self.navigate(url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url.split('?')[0])})")

    def picture(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.screenshot()))


class Chromium(Browser):

    def __init__(self):
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            raise SystemExit("chromium is missing: apt-get install chromium")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def place():
            # The browser expects its pipes at descriptors 3 and 4, which may be in use.
            [a, b] = [os.dup(to_browser), os.dup(from_browser)]
            [a, b] = [os.dup2(end, 100 + place) for place, end in enumerate((a, b))]
            os.dup2(a, 3)
            os.dup2(b, 4)

        # A container has no user namespaces for the sandbox; the pages are our own.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
                 "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen([program, *flags], preexec_fn=place, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.count, self.waiting, self.problems = 0, b"", []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.waiting:
            part = os.read(self.read_end, 1 << 16)
            if not part:
                raise RuntimeError("the browser has gone")
            self.waiting += part
        text, self.waiting = self.waiting.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if getattr(self, "session", None):
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while (answer := self.message()).get("id") != self.count:
            self.note(answer)
        if "error" in answer:
            kind = Navigated if "navigated" in answer["error"]["message"] else RuntimeError
            raise kind(f"{method}: {answer['error']}")
        return answer["result"]

    def note(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(params["exceptionDetails"]["text"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.problems.append(str(params["args"]))
            case "Page.javascriptDialogOpening":
                self.problems.append("a dialog: " + params["message"])

    def value(self, expression):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def navigate(self, url):
        self.call("Page.navigate", url=url)

    def look(self, width, height, scheme="light"):
        """Sets the size of the window and the colour scheme of the system."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 500)
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": " "} if key == " " and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code,
                      windowsVirtualKeyCode={"Tab": 9, "Space": 32}[code], **text)

    def screenshot(self):
        return self.call("Page.captureScreenshot", format="png")["data"]

    def close(self):
        try:
            # The browser's processes end with it and no longer use the profile.
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()
