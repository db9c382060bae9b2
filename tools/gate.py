"""What the gates share: the list of sources, and how a gate reports and proves that it can fail."""
import pathlib
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent


def sources(top, folders, suffixes=(".h", ".cc", ".S", ".c"), excluded=()):
    """(path relative to top, text) of each source below the folders."""
    for folder in folders:
        for path in sorted((top / folder).rglob("*")):
            name = path.relative_to(top).as_posix()
            if path.suffix in suffixes and path.is_file() and not name.startswith(tuple(excluded)):
                yield name, path.read_text(errors="replace")


def main(check, bad_trees, good_trees=()):
    """check(top) gives complaints. --self-test: each bad tree {name: text} must be complained about, each good one not."""
    if "--self-test" in sys.argv[1:]:
        failures = 0
        for expected, trees in ((True, bad_trees), (False, good_trees)):
            for tree in trees:
                with tempfile.TemporaryDirectory() as folder:
                    for name, text in tree.items():
                        path = pathlib.Path(folder, name)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(text)
                    complaints = list(check(pathlib.Path(folder)))
                if bool(complaints) != expected:
                    failures += 1
                    print(f"self-test: {'nothing' if expected else complaints} said about {tree}")
        print(f"self-test: {len(bad_trees)} bad and {len(good_trees)} good inputs, {failures} judged wrongly")
        return 1 if failures else 0
    complaints = list(check(TOP))
    for complaint in complaints:
        print(complaint)
    print(f"{len(complaints)} complaints")
    return 1 if complaints else 0
