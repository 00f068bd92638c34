"""For mkdocs: links to files outside docs/ become their names, since the site has no such files."""

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Of one page."""
    return _OUT.sub(lambda link: f"`{link[2] or link[1]}`" if link[1] != link[2] else f"`{link[2]}`", markdown)
