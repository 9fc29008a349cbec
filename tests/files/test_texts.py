"""Documents become the text that a person sees in them, and whatever else a file holds is one error that says so."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gatesight_hf.commands.cli import main
from gatesight_hf.files import texts
from gatesight_hf.files.texts import read_documents

#: Twenty and more characters, and none of other pages.
LINES = ("The red key opens the north gate.", "The blue key opens nothing at all.")


def pdf(path: Path, *pages: str, user: str | None = None, owner: str | None = None) -> Path:
    """A PDF with one line of Helvetica on each page; empty ones have a page with nothing on it."""
    pypdf = pytest.importorskip("pypdf")
    generic = pypdf.generic
    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(width=400, height=200)
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        named = {generic.NameObject(key): generic.NameObject(value) for key, value in font.items()}
        fonts = generic.DictionaryObject({generic.NameObject("/F1"): generic.DictionaryObject(named)})
        resources = generic.DictionaryObject({generic.NameObject("/Font"): fonts})
        page[generic.NameObject("/Resources")] = resources
        if text:
            content = generic.StreamObject()
            content.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode("latin-1"))
            page[generic.NameObject("/Contents")] = writer._add_object(content)
    if owner is not None:
        writer.encrypt(user or "", owner, algorithm="RC4-128")
    with path.open("wb") as file:
        writer.write(file)
    return path


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# -- text --------------------------------------------------------------------------------------------------------------


def test_text_and_markdown_stay_as_they_are(tmp_path: Path) -> None:
    text = "# Titel\n\n*Größe*: 中文\n"
    for name in ("a.txt", "a.md", "a.log", "a"):
        assert read_documents([written(tmp_path / name, text)]) == text
    assert read_documents([written(tmp_path / "bom.txt", b"\xef\xbb\xbfone\r\ntwo\rthree")]) == "one\ntwo\nthree"


def test_several_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("x", "y"):
        Path(folder).mkdir()
    first, second, third = (written(Path(name), name) for name in ("a.txt", "x/b.md", "y/b.md"))
    assert read_documents([first, second]) == "# a.txt\n\na.txt\n\n# b.md\n\nx/b.md"
    assert "# x/b.md\n" in read_documents([second, third])


def test_standard_input_is_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    give("grün".encode())
    assert read_documents([Path("-")]) == "grün"
    give(b"two")
    assert (
        read_documents([written(tmp_path / "a.txt", "one"), Path("-")]) == "# a.txt\n\none\n\n# standard input\n\ntwo"
    )
    give(b"\xff")
    with pytest.raises(ValueError, match="standard input is not a text file in UTF-8"):
        read_documents([Path("-")])
    with pytest.raises(ValueError, match="once"):
        read_documents([Path("-"), Path("-")])


def test_standard_input_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for closed in (None, _closed()):
        monkeypatch.setattr("sys.stdin", closed)
        with pytest.raises(ValueError, match="is closed"):
            read_documents([Path("-")])


def _closed() -> io.TextIOWrapper:
    file = io.TextIOWrapper(io.BytesIO())
    file.close()
    return file


def test_names_that_are_no_characters_are_shown_with_others(tmp_path: Path) -> None:
    path, other = tmp_path / os.fsdecode(b"a\xff.txt"), tmp_path / "b.txt"
    for one in (path, other):
        one.write_text("Tin.", encoding="utf-8")
    assert read_documents([path, other]) == "# a?.txt\n\nTin.\n\n# b.txt\n\nTin."
    path.write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"a\?\.txt is not a text file"):
        read_documents([path])


@pytest.mark.parametrize("data", [b"\xff\xfeh\x00i\x00", b"caf\xe9", bytes(range(256)), b"a\0b"])
def test_what_is_no_text_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.txt is not a text file in UTF-8"):
        read_documents([written(tmp_path / "a.txt", data)])


@pytest.mark.parametrize("name", ["a.txt", "a.html"])
@pytest.mark.parametrize("data", [b"", b" \n", b"\xef\xbb\xbf"])
def test_nothing_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    with pytest.raises(ValueError, match="holds no text"):
        read_documents([written(tmp_path / name, data)])


def test_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list of paths"):
        read_documents(tmp_path / "a.txt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be a path"):
        read_documents([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="No document"):
        read_documents([])
    with pytest.raises(FileNotFoundError):
        read_documents([tmp_path / "missing.txt"])
    with pytest.raises(IsADirectoryError):
        read_documents([tmp_path])


def test_no_more_is_read_than_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bs4")
    path, page = written(tmp_path / "a.txt", "x" * 60), written(tmp_path / "a.html", "y" * 60)
    monkeypatch.setattr(texts, "TEXT_LIMIT", 100)
    with pytest.raises(ValueError, match="more than 100 characters"):
        read_documents([path, page])
    monkeypatch.setattr(texts, "HTML_LIMIT", 59)
    with pytest.raises(ValueError, match=r"a\.html has more than 59 bytes"):
        read_documents([page])
    monkeypatch.setattr(texts, "FILE_LIMIT", 59)
    with pytest.raises(ValueError, match=r"a\.txt has more than 59 bytes"):
        read_documents([path])


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library in (("a.pdf", "pypdf"), ("a.html", "lxml"), ("a.html", "bs4")):
        package = texts.PIP_NAMES[library]
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=rf'{library}, which .* "documents" brings: pip install {package}$'):
            read_documents([written(tmp_path / name, "text")])


# -- HTML --------------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html><head><title>Not shown</title><style>p { color: red }</style></head>
<body><!-- no comment --><script>var secret = "<p>no</p>";</script>
<h1>Keys &amp; gates</h1><p>The <b>red</b> key
opens&nbsp;it.<br>At once.</p><p hidden>no</p><div style="display: none">no <p>either</p></div>
<ul><li>one</li><li>two <i>more</i></li></ul>
<table><tr><th>key</th><th>gate</th></tr><tr><td>red</td><td>north</td></tr></table>
<pre>def f():
    return 1</pre><noscript>no</noscript><template>no</template>
<p>caf&eacute; &#x1F511;</p></body></html>"""
SHOWN = """# Keys & gates

The red key opens it.
At once.

- one
- two more

key | gate
red | north

def f():
    return 1

café 🔑"""


def test_of_html_the_shown_text_is_read(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    assert read_documents([written(tmp_path / "a.html", PAGE)]) == SHOWN
    assert read_documents([written(tmp_path / "a.HTM", b"\xef\xbb\xbf" + PAGE.encode())]) == SHOWN


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("just text", "just text"),
        ("<p>one<p>two", "one\n\ntwo"),
        ("a<b>b</b>c <i> d</i>", "abc d"),
        ("<li></li>after", "after"),
        ("<p>1 &lt; 2</p><![CDATA[no]]>", "1 < 2"),
        ('<meta charset="windows-1252"><p>caf\udce9</p>', "café"),
        ('<iframe src="http://192.0.2.1/"></iframe><img src="http://192.0.2.1/">text', "text"),
    ],
)
def test_markup_of_all_kinds(html: str, shown: str, tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    assert read_documents([written(tmp_path / "a.html", html.encode("utf-8", "surrogateescape"))]) == shown


def test_entities_of_a_page_lead_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    secret = written(tmp_path / "secret.txt", "the secret")
    for page in (f'<!DOCTYPE x [<!ENTITY e SYSTEM "{secret.as_uri()}">]><p>a &e; b</p>', f"<p>a</p><img src={secret}>"):
        assert "secret" not in read_documents([written(tmp_path / "a.html", page)])


def test_a_page_may_nest_without_end(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    nested = written(tmp_path / "a.html", "<div>" * 20_000 + "deep" + "</div>" * 20_000)
    assert read_documents([nested]) == "deep"


@pytest.mark.parametrize("open_end", ["<a ", "<a b='", "<!--", "<?", "</", "<![", "<", "&a"])
def test_what_is_left_open_takes_no_longer(open_end: str, tmp_path: Path) -> None:
    """Parsers that look for the end anew at each beginning would take minutes."""
    pytest.importorskip("bs4")
    page = written(tmp_path / "a.html", "shown " + open_end * 100_000)
    assert read_documents([page]).startswith("shown")


# -- PDF ---------------------------------------------------------------------------------------------------------------


def test_of_a_pdf_the_text_of_all_pages_is_read(tmp_path: Path) -> None:
    path = pdf(tmp_path / "a.pdf", *LINES)
    assert read_documents([path]) == "\n\n".join(LINES)
    assert read_documents([path.rename(tmp_path / "download")]) == "\n\n".join(LINES)


def test_pages_without_text_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 of 3 pages hold no text"):
        assert read_documents([pdf(tmp_path / "a.pdf", LINES[0], "", LINES[1])]) == "\n\n".join(LINES)
    for pages in (("",), ("", "")):
        with pytest.raises(ValueError, match=r"none of its \d pages holds text.*OCR"):
            read_documents([pdf(tmp_path / "a.pdf", *pages)])


def test_an_encrypted_pdf_is_read_only_if_it_opens_without_a_password(tmp_path: Path) -> None:
    assert read_documents([pdf(tmp_path / "a.pdf", *LINES, owner="owner")]) == "\n\n".join(LINES)
    with pytest.raises(ValueError, match="encrypted PDF"):
        read_documents([pdf(tmp_path / "a.pdf", *LINES, user="secret", owner="owner")])


def test_a_damaged_pdf_is_one_error_whatever_is_wrong(tmp_path: Path) -> None:
    whole = pdf(tmp_path / "a.pdf", *LINES).read_bytes()
    cases = [b"", b"%PDF-1.7\n", whole[:60], bytes(512), b"\xff" * 64, whole.replace(b"/Pages", b"/Paces")]
    for data in cases:
        with pytest.raises(ValueError, match=r"a\.pdf|none of its"):
            read_documents([written(tmp_path / "a.pdf", data)])


def test_long_pdfs_stop_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "TEXT_LIMIT", 40)
    with pytest.raises(ValueError, match="more than 40 characters"):
        read_documents([pdf(tmp_path / "a.pdf", *LINES)])


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_question_is_asked_to_a_pdf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pdf(tmp_path / "a.pdf", "One of the special magic numbers for amber-river is: 4821.")
    arguments: list[Any] = ["ask", "--document", path, "--question", "Question: what?", "--max-new-tokens", "2"]
    assert main(list(map(str, arguments))) == 0
    assert "tokens; KV cache" in capsys.readouterr().out
