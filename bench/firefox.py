"""Headless Firefox over Marionette, its native remote protocol, on which WebDriver is built."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time

from browser import Browser, Navigated

# Sets the size of the page, which may be below the minimum width of a window, and the system's colour scheme.
LOOK = """
const page = gBrowser.selectedBrowser;
page.style.flex = "none";
page.style.width = arguments[0] + "px";
page.style.height = arguments[1] + "px";
page.browsingContext.prefersColorSchemeOverride = arguments[2];
"""

# Errors and refused content of our pages, without messages about Firefox itself.
COMPLAINTS = """
return Services.console.getMessageArray()
  .filter(m => m instanceof Ci.nsIScriptError && !(m.flags & m.warningFlag) && /^(http|file):/.test(m.sourceName))
  .map(m => m.errorMessage);
"""


class Firefox(Browser):
    def __init__(self):
        program = shutil.which("firefox-esr") or shutil.which("firefox")
        if program is None:
            raise SystemExit("firefox is missing: apt-get install firefox-esr")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with open(f"{self.profile.name}/user.js", "w") as file:
            file.write('user_pref("marionette.port", 0);\nuser_pref("app.update.enabled", false);\n')
        flags = ["--headless", "--no-remote", "--marionette", "--remote-allow-system-access", "--profile",
                 self.profile.name]
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.stream = socket.create_connection(("127.0.0.1", self.port())).makefile("rwb")
            self.count = 0
            self.message()
            self.call("WebDriver:NewSession", capabilities={})
            self.look(1200, 900)
        except BaseException:
            self.process.kill()
            raise

    def port(self, seconds=60):
        """The port that Firefox chose and wrote into its profile."""
        path, end = f"{self.profile.name}/MarionetteActivePort", time.monotonic() + seconds
        while not (os.path.exists(path) and os.path.getsize(path)):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"firefox has ended, or does not answer within {seconds} s")
            time.sleep(0.05)
        with open(path) as file:
            return int(file.read())

    def message(self):
        """A message: its length in decimal, a colon, and JSON."""
        length = b""
        while (byte := self.stream.read(1)) != b":":
            if not byte:
                raise RuntimeError("the browser has gone")
            length += byte
        return json.loads(self.stream.read(int(length)))

    def call(self, command, **parameters):
        self.count += 1
        text = json.dumps([0, self.count, command, parameters]).encode()
        self.stream.write(b"%d:%s" % (len(text), text))
        self.stream.flush()
        _, _, error, result = self.message()
        if error is not None:
            kind = Navigated if "unloaded" in error["message"] else RuntimeError
            raise kind(f"{command}: {error['message']}")
        return result

    def in_its_window(self, script, *arguments):
        """Runs a script in the context of the browser's own windows."""
        self.call("Marionette:SetContext", value="chrome")
        try:
            return self.call("WebDriver:ExecuteScript", script=script, args=list(arguments))["value"]
        finally:
            self.call("Marionette:SetContext", value="content")

    @property
    def problems(self):
        return self.in_its_window(COMPLAINTS)

    def value(self, expression):
        """The value of a JavaScript expression in the page."""
        return self.call("WebDriver:ExecuteScript", script=f"return ({expression})", args=[])["value"]

    def navigate(self, url):
        self.call("WebDriver:Navigate", url=url)

    def look(self, width, height, scheme="light"):
        """Sets the size of the page and the colour scheme of the system."""
        self.call("WebDriver:SetWindowRect", width=max(width, 500) + 100, height=height + 200)
        self.in_its_window(LOOK, width, height, scheme)

    def press(self, key, _code):
        value = {"Tab": "\ue004"}.get(key, key)
        steps = [{"type": kind, "value": value} for kind in ("keyDown", "keyUp")]
        self.call("WebDriver:PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def screenshot(self):
        return self.call("WebDriver:TakeScreenshot", full=False)["value"]

    def close(self):
        try:
            self.call("Marionette:Quit", flags=["eAttemptQuit"])
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()
