"""Headless Chromium, controlled over a pipe."""

import contextlib
import json
import os
import shutil
import subprocess
from base64 import b64decode

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

# Pages consist of shadow DOMs: collect the text of each.
TEXT = """
function text(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.textContent + " ";
  if (["SCRIPT", "STYLE", "TEMPLATE"].includes(node.nodeName)) return "";
  let all = node.shadowRoot ? text(node.shadowRoot) : "";
  for (const child of node.childNodes) all += text(child);
  return all;
}
new Promise(resolve => setTimeout(() => resolve(document.body ? text(document.body) : ""), 200))
"""


class RefusedError(Exception):
    """The browser returned an error."""


class Browser:
    """Chromium, controlled by the DevTools protocol."""

    def __init__(self, profile):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1400,1000",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "browser", BROWSER, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._seen, self._asked, self._page = b"", 0, {}

    def ask(self, method, **parameters):
        """Send a command; return its result."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": parameters, **self._page}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._seen:
                part = os.read(self._read, 1 << 16)
                assert part, "the browser has ended"
                self._seen += part
            answer, _, self._seen = self._seen.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == self._asked:
                if "error" in answer:
                    raise RefusedError(answer["error"]["message"])
                return answer["result"]

    def shown(self, address, *words):
        """Return a page's text once it has all `words`, or after a minute."""
        self._page = {}
        target = self.ask("Target.createTarget", url=address)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._page = {"sessionId": session}
        looking = {"expression": TEXT, "awaitPromise": True, "returnByValue": True}
        text = ""
        for _ in range(300):
            with contextlib.suppress(RefusedError):  # the page is being replaced
                text = self.ask("Runtime.evaluate", **looking)["result"]["value"]
            if text and all(word in text for word in words):
                break
        return text

    def picture(self):
        """Return the current page as PNG."""
        return b64decode(self.ask("Page.captureScreenshot")["data"])

    def close(self):
        """Close the browser."""
        self._page = {}
        with contextlib.suppress(AssertionError, OSError, RefusedError):
            self.ask("Browser.close")
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
