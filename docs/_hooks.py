"""MkDocs hook: the examples in the help of a command keep their lines. click marks them with a
control character that Markdown ignores.
"""

import re

_EXAMPLES = re.compile(
    r"<p>\x08?\s*(Examples?:|A first job:|Shell completion[^\n]*:)\n(.*?)</p>", re.DOTALL
)


def on_page_content(html, page, **_):
    """Turn example paragraphs of the command reference into code blocks."""
    if page.file.src_path != "cli.md":
        return html
    return _EXAMPLES.sub(lambda m: f"<p>{m[1]}</p><pre><code>{m[2]}\n</code></pre>", html)
