"""The frame of every HTML page: one file with embedded images, no network access, readable on a phone."""

import base64
import html
from collections.abc import Sequence


def document(title: str, sections: Sequence[str], *, style: str, script: str = "") -> str:
    """Return a page as text, from its sections as HTML, the empty ones left out.

    Args:
        title: plain text.
        sections: HTML, in which all text from outside is escaped.
        style: CSS beside that of all pages.
        script: JavaScript that runs when the page is there.
    """
    body = "\n".join(filter(None, [*sections, script and f"<script>{script}</script>"]))
    return _DOCUMENT.format(title=html.escape(title), style=_STYLE + style, body=body)


def data_address(image: bytes, kind: str = "png") -> str:
    """The address of an image in the page itself; `kind` is png or jpeg."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def percent(probability: float) -> str:
    """A probability as text, such as 4.2%."""
    return f"{probability:.1%}" if probability >= 0.001 else "< 0.1%"


_STYLE = """
:root { color-scheme: light; font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 76rem; margin: 0 auto; padding: 0.75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.25rem 0; } h2 { font-size: 1.15rem; margin: 1.5rem 0 0.25rem; }
small { font-weight: normal; color: #444; } figure { margin: 0; }
.controls { display: flex; flex-wrap: wrap; gap: 0.5rem 1rem; align-items: center; margin: 0.5rem 0; }
.controls select { font: inherit; max-width: 14rem; }
.cards { display: grid; gap: 1rem; }
article { border: 1px solid #ccc; border-radius: 0.5rem; padding: 0.75rem; min-width: 0; }
article[hidden] { display: none; }
"""

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
