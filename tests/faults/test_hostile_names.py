"""Link loops, and file names with newlines, markup, formulas, text-direction marks or bytes that are not text."""

from __future__ import annotations

import json
import os
import unicodedata

import numpy as np
import pytest

from kontrast.data import open_data

from support.command_line import kontrast, one_line
from support.made_images import QUICK, encoded, folder_of, picture

SCRIPT = "<script>alert(1)<"  # a slash would be another folder
NAMES = [
    b"new\nline.png",
    b"carriage\rreturn.png",
    b'quote".png',
    b"apostrophe'.png",
    b"back\\slash.png",
    SCRIPT.encode() + b".png",
    b"<img src=x onerror=alert(2)>.png",
    b'=HYPERLINK("http:x",1).png',
    b"+1+2,3;4\t5.png",
    b"\xff\xfe\x80.png",
    b"\x1b]0;owned\x07\x1b[31mred.png",
    b"\x01\x02.png",
    "\u202egnp.exe.png".encode(),  # right-to-left override: shows as exe.png
    "\N{ROLLING ON THE FLOOR LAUGHING}.png".encode(),
    "gr\u00f6\u00dfe.png".encode(),
    unicodedata.normalize("NFD", "gr\u00f6\u00dfe.png").encode(),
    b"--out=elsewhere.png",
    b"$(touch owned).png",
    b"%n%s{0}.png",
    b"x" * 246 + b".png",
]


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Write two classes of images with such names; the names of the classes are strange too."""
    root = tmp_path_factory.mktemp("strange")
    for number, place in enumerate((b"<b onclick=alert(3)>cats\xff", b"=2+3\ndogs")):
        folder = os.path.join(os.fsencode(root), place)
        os.mkdir(folder)
        for i, name in enumerate(NAMES):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(encoded(picture(100 * number + i), "PNG"))
    return root


@pytest.fixture(scope="module")
def run(strange, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    done = kontrast("pretrain", str(strange), *QUICK, "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


def originals() -> list[bytes]:
    return sorted(p + b"/" + n for p in (b"<b onclick=alert(3)>cats\xff", b"=2+3\ndogs") for n in NAMES)


@pytest.mark.fault(17)
@pytest.mark.parametrize("follow", [False, True])
def test_link_loops_end_and_files_count_once(tmp_path, follow):
    """Links are followed only on request; then every file counts once. Loops end and are counted."""
    root = folder_of(tmp_path / "pictures", 5, classes=3)
    for number in range(3):
        (root / f"class{number}" / "loop").symlink_to(root)
        (root / f"class{number}" / "self").symlink_to(root / f"class{number}" / "self")
    (root / "class0" / "again.png").symlink_to(root / "class0" / "0000.png")
    os.link(root / "class1" / "0001.png", root / "class1" / "hard.png")
    images = open_data(root, "all", follow_links=follow)
    if follow:
        assert len(images) == 15 and images.notes["seen twice"] == 5
    else:
        assert len(images) == 16 and images.notes["links not followed"] == 7
    assert len(set(images.names)) == len(images)


@pytest.mark.fault(17)
def test_folder_with_only_links(tmp_path):
    """Exit 3 has the number of links and the setting to follow them; with that setting it trains."""
    root, links = folder_of(tmp_path / "pictures", 40), tmp_path / "links"
    links.mkdir()
    for path in root.iterdir():
        (links / path.name).symlink_to(path)
    argv = ["pretrain", str(links), *QUICK, "--no-probes", "--device", "cpu", "--out", str(tmp_path / "run")]
    one_line(kontrast(*argv), 3, "40 links", "data.follow_links=true")
    assert kontrast(*argv, "data.follow_links=true").returncode == 0


@pytest.mark.fault(18)
def test_strange_names_train(strange, run):
    """All images train, and the run folder's listing returns every name byte for byte."""
    import gzip

    images = open_data(strange, "all")
    assert sorted(map(os.fsencode, images.names)) == originals()
    lines = gzip.decompress((run / "files.txt.gz").read_bytes()).decode("ascii").splitlines()
    listed = [os.fsencode(json.loads(line[17:])) for line in lines]
    assert sorted(listed) == originals()
    done = kontrast("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", str(run))
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(18)
@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_strange_names_in_embeddings(strange, run, tmp_path, kind):
    """`embed` and `neighbors` return every name exactly; printed names are one line that can't control the terminal."""
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra kontrast[parquet]")
    from kontrast.runs.embeddings_file import read_embeddings

    out = tmp_path / f"vectors.{kind}"
    done = kontrast("embed", str(run), str(strange), "--out", str(out), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert sorted(map(os.fsencode, read_embeddings(out).names)) == originals()
    image = folder_of(tmp_path / "one", 1) / "0000.png"
    argv = ["neighbors", str(run), str(image), "--embeddings", str(out), "-k", "40", "--device", "cpu"]
    found = json.loads(kontrast(*argv, "--json").stdout)["neighbors"]
    assert sorted(os.fsencode(one["name"]) for one in found) == originals()
    shown = kontrast(*argv).stdout
    assert len(shown.splitlines()) == 40 and all(c.isprintable() or c == "\n" for c in shown)


@pytest.mark.fault(18)
def test_strange_names_in_a_labels_csv(tmp_path):
    """A CSV with newlines, quotes, commas, formulas and odd bytes labels each image; nothing is evaluated."""
    import csv

    root = tmp_path / "pictures"
    root.mkdir()
    for number, name in enumerate(NAMES):
        with open(os.path.join(os.fsencode(root), name), "wb") as file:
            file.write(encoded(picture(number), "PNG"))
    table = tmp_path / "labels.csv"
    with open(table, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows(
            (os.fsdecode(name), "=1+1" if i % 2 else "@cmd|'x'!A1") for i, name in enumerate(NAMES)
        )
    from kontrast.data import read_labels

    labelled = read_labels(open_data(root), table)
    assert labelled.classes == ["=1+1", "@cmd|'x'!A1"]
    expected = {name: int(not i % 2) for i, name in enumerate(NAMES)}
    assert {os.fsencode(n): int(label) for n, label in zip(labelled.names, labelled.labels)} == expected


@pytest.mark.fault(18)
def test_bad_file_with_a_strange_name(tmp_path):
    """The message about it is one line of printable characters; bad.jsonl has the exact name."""
    root = folder_of(tmp_path / "pictures", 60)
    name = b"\x1b[2Jbad\n\xff\xe2\x80\xae.jpg"
    with open(os.path.join(os.fsencode(root), name), "wb") as file:
        file.write(b"nothing")
    done = kontrast("pretrain", str(root), *QUICK, "--no-probes", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert r"1 of 61 images: \x1b[2Jbad\n\udcff\u202e.jpg (" in done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stderr)
    assert os.fsencode(json.loads((tmp_path / "run" / "bad.jsonl").read_text())["name"]) == name


@pytest.mark.fault(18)
@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b"\x01\x7f", b"a=b", b"quo\"te'", "\u202e\u2028".encode()])
def test_data_folder_with_a_strange_name(tmp_path, name, monkeypatch):
    """The stored recipe reads back and names the same folder; a name that TOML can't express is refused first."""
    root = folder_of(tmp_path / "plain", 40)
    odd = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
    os.rename(root, odd)
    argv = ["--no-probes", "--device", "cpu", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["kontrast", "pretrain", odd, *argv])  # the recipe's first line is the command
    done = kontrast("pretrain", odd, *QUICK, *argv)
    if name == b"\xff\xfe":
        one_line(done, 2, "UTF-8", "rename")
        assert not (tmp_path / "run").exists()
        return
    assert done.returncode == 0, done.stderr
    again = kontrast("pretrain", "--resume", *argv, "training.max_steps=4")
    assert again.returncode == 0, again.stderr


@pytest.mark.fault(18)
def test_output_folder_with_a_strange_name(tmp_path):
    """A run folder may have any name; its report and its resume command work."""
    for name in (b"\xff run", b"<script>", b"new\nline", b"-x"):
        out = os.path.join(os.fsencode(tmp_path), name)
        done = kontrast(
            "pretrain", str(folder_of(tmp_path / "pictures", 40)), *QUICK, "--device", "cpu", "--out", os.fsdecode(out)
        )
        assert done.returncode == 0, done.stderr
        assert os.path.exists(os.path.join(out, b"report.html"))
        done = kontrast("pretrain", "--resume", "--no-probes", "--device", "cpu", "--out", os.fsdecode(out))
        assert done.returncode == 0, done.stderr


@pytest.mark.fault(39)
def test_report_shows_strange_names_as_text(run, tmp_path):
    """The page shows every name and class as text; its policy forbids requests, and no markup comes from the data."""
    from html.parser import HTMLParser

    page = tmp_path / "page.html"
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe + "# </script><script>alert(4)</script> <!-- --> @SCRIPT@\n")
    assert kontrast("report", str(run), "--out", str(page)).returncode == 0
    (run / "recipe.toml").write_text(recipe)
    tags, blocks, text = [], [], page.read_text("utf-8")

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

        def handle_data(self, content):
            if tags and tags[-1][0] == "script":
                blocks.append(content)

    Reader().feed(text)
    policy = next(a["content"] for t, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe-inline" not in policy.split("style-src")[0]
    assert [t for t, _ in tags].count("script") == 2 == text.count("</script>")
    assert not {"img", "b", "iframe", "object", "base"} & {t for t, _ in tags}
    assert not any(key.startswith("on") or key == "src" for _, a in tags for key in a)
    assert [a["href"] for _, a in tags if "href" in a] == ["data:,"]
    data = json.loads(blocks[0])
    gallery = data["runs"][0]["gallery"]
    assert gallery["classes"] == ["<b onclick=alert(3)>cats\udcff", "=2+3\ndogs"]
    names = {point["name"] for point in gallery["points"]}
    assert len(names) > 5 and {os.fsencode(n) for n in names if "\u2026" not in n} <= set(originals())
    assert "</script><script>alert(4)</script>" in data["runs"][0]["recipe"]


@pytest.mark.fault(39)
@pytest.mark.browser
def test_browser_shows_strange_names_as_text(run, tmp_path):
    """In a real browser nothing is executed or requested, and the markup is visible as text."""
    from selenium import webdriver

    page = tmp_path / "page.html"
    assert kontrast("report", str(run), "--out", str(page)).returncode == 0
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options)
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        assert not browser.find_elements("css selector", "[onclick], [onerror]")
        assert "<b onclick=alert(3)>cats" in browser.find_element("tag name", "body").text
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert all(a.startswith(("file:", "data:")) for a in addresses), addresses
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        browser.quit()


@pytest.mark.fault(39)
def test_hostile_numbers_do_not_break_the_report(run, tmp_path):
    """Results that are text, infinite or of other types are skipped; the page is still written."""
    import shutil

    for number, content in enumerate(
        [
            '{"probes": "</script>"}',
            '{"probes": [{"probe": "</script>", "accuracy": 1e999}]}',
            "[" * 5000,
            '{"probes": [[]]}',
        ]
    ):
        other = tmp_path / f"run{number}"
        shutil.copytree(run, other)
        for name in ("probes.json", "run.json", "lens.json", "gallery.json"):
            (other / name).write_text(content)
        (other / "metrics.jsonl").write_text(
            '{"step": "x", "loss": {}}\n{"step": 1e400, "epoch": [], "loss": NaN}\n' * 3
        )
        done = kontrast("report", str(other))
        assert done.returncode == 0 and np.isclose((other / "report.html").read_text().count("</script>"), 2), (
            done.stderr
        )
