"""A page on 127.0.0.1 that answers for the picture that is dropped on it. Only this machine can reach it."""

import http.server
import threading
import urllib.parse
from typing import Protocol

from keras_vit import UserError
from keras_vit.errors import explained
from training.options.predict import HOST

# Largest request in bytes.
_LARGEST = 64 * 2**20
_HOSTS = (HOST, "localhost")


class PictureAnswerer(Protocol):
    """What the page shows of a picture."""

    def answer(self, data: bytes, name: str) -> str:
        """HTML text for the bytes of a picture. Raises UserError if they are none."""
        ...


def open_server(
    model: PictureAnswerer, port: int, title: str = "Classify a picture"
) -> http.server.ThreadingHTTPServer:
    """Return the server of the page; `serve_forever` answers requests. With port 0 the system chooses one.

    Raises UserError if the port is in use.
    """
    one_at_a_time = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._is_from_elsewhere():
                self._answer(403, "Open this page as http://127.0.0.1.")
            elif self.path != "/":
                self._answer(404, "There is one page, at /.")
            else:
                self._answer(200, _PAGE.replace("{title}", title))

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self._is_from_elsewhere():
                self._answer(403, "Open this page as http://127.0.0.1.")
                return
            if not length.isdecimal() or int(length) > _LARGEST:
                self._answer(413, f"A picture has at most {_LARGEST // 2**20} MB.")
                return
            data = self.rfile.read(int(length))
            name = urllib.parse.unquote(self.headers.get("X-Name", "picture"))
            try:
                with one_at_a_time:
                    page = model.answer(data, name)
                self._answer(200, page)
            except UserError as error:
                self._answer(422, str(error))

        def _is_from_elsewhere(self) -> bool:
            """Whether the request uses another name for this machine, as a foreign page in the browser might."""
            return self.headers.get("Host", "").rsplit(":", 1)[0] not in _HOSTS

        def _answer(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args) -> None:
            """Print nothing for each request."""

    with explained(lambda why: f"Port {port} cannot be used ({why}); give another --port, or 0 for any.", OSError):
        return http.server.ThreadingHTTPServer((HOST, port), Handler)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; }
label { display: block; border: 2px dashed #767676; border-radius: 8px; padding: 2rem 1rem; text-align: center; }
label:focus-within, label.over { border-color: #0072b2; background: #f0f7fc; }
input { display: block; max-width: 100%; margin: 0.75rem auto 0; font: inherit; }
iframe { width: 100%; border: 0; }
</style>
<h1>{title}</h1>
<label id="drop">Drop a picture here, or choose one. <input type="file" accept="image/*"></label>
<p role="status" id="status"></p>
<iframe id="result" title="Result" hidden></iframe>
<script>
const LARGEST = {largest};
const drop = document.getElementById("drop"), status = document.getElementById("status");
const result = document.getElementById("result");
async function classify(file) {
  if (!file) return;
  result.hidden = true;
  if (file.size > LARGEST) {
    status.textContent = file.name + " is too large: a picture has at most " + LARGEST / 2**20 + " MB.";
    return;
  }
  status.textContent = "Looking at " + file.name + " …";
  try {
    const answer = await fetch("/", {method: "POST", body: file, headers: {"X-Name": encodeURIComponent(file.name)}});
    const text = await answer.text();
    status.textContent = answer.ok ? "" : text;
    result.hidden = !answer.ok;
    if (answer.ok) result.srcdoc = text;
  } catch (error) {
    status.textContent = "The program behind this page does not answer; start it again.";
  }
}
// The frame is as high as its content, so that the page has one scroll bar.
function fit() {
  if (!result.hidden) result.style.height = result.contentDocument.documentElement.scrollHeight + "px";
}
result.addEventListener("load", fit);
addEventListener("resize", () => { result.style.height = 0; fit(); });
drop.querySelector("input").addEventListener("change", event => classify(event.target.files[0]));
drop.addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", event => {
  event.preventDefault(); drop.classList.remove("over"); classify(event.dataTransfer.files[0]);
});
</script>
</html>
""".replace("{largest}", str(_LARGEST))
