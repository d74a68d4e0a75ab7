"""Writes docs/llms.txt, the pages of the site with their first sentence, in the order of mkdocs.yml (https://llmstxt.org).

python tests/llms_page.py > docs/llms.txt
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference_pages
import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "llms.txt"


def lines() -> Iterator[str]:
    """The site's name and description, then its sections."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    yield f"# {site['site_name']}\n"
    yield f"> {site['site_description']}.\n"
    for section in site["nav"]:
        ((title, pages),) = section.items()
        yield f"## {title}\n"
        for name in flat(pages):
            folder, _, written = name.rpartition("/")
            if folder == "reference":  # made with the site
                text, address = reference_pages.page(written), f"{site['site_url']}{name.removesuffix('.md')}/"
            else:
                text, address = (ROOT / "docs" / name).read_text(), f"{site['repo_url']}/blob/main/docs/{name}"
            heading, sentence = first_words(text)
            yield f"- [{heading}]({address}): {sentence}"
        yield ""


def flat(pages: str | list[Any]) -> Iterator[str]:
    """The pages of a section and of those in it."""
    for one in [pages] if isinstance(pages, str) else pages:
        if isinstance(one, str):
            yield one
        else:
            yield from flat(next(iter(one.values())))


def first_words(text: str) -> tuple[str, str]:
    """The heading and the first sentence of a page."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert heading is not None, text[:100]
    skipped = r"^```.*?^```$|^(?:!\[|\||#|    |<!--).*?$"  # code, pictures, tables, headings, comments
    prose = re.sub(skipped, "", text[heading.end() :], flags=re.DOTALL | re.MULTILINE)
    paragraph = " ".join(prose.strip().partition("\n\n")[0].split())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return heading[1], re.split(r"(?<=[.:?]) ", plain)[0].rstrip(".:") + "."


def page() -> str:
    """The whole page."""
    return "\n".join(lines()).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
