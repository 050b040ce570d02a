"""What a fresh process does in the tests of the hub; run as a file, outside the repository. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

# An editable install would be found too; this process has only what is on its path.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]


def outcome(work):
    """[class, message] of what `work` raises; ["", ""] if it returns."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def train(checkpoint):
    """Loads a model, patches it, compares logits with the unpatched ones, runs one backward."""
    import torch
    from transformers import AutoModelForCausalLM

    import mok_hf

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.arange(12).reshape(2, 6) + 3
    with torch.no_grad():
        native = model(input_ids=ids).logits
    report = mok_hf.patch_model(model)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "experts" in name]
    return {
        "patched": len(report.patched),
        "drift": ((out.logits - native).norm() / native.norm()).item(),
        "gradients": len(gradients),
        "gradients_nonzero": all(g is not None and bool(g.isfinite().all()) and bool(g.any()) for g in gradients),
    }


def first_use(checkpoint):
    """Refused until the user says that the publisher is trusted; then fetched, loaded and trained with."""
    import mok_hf
    from mok_hf import kernel

    refused = outcome(kernel.load)
    os.environ["MOK_TRUST_KERNEL"] = "somebody/else"
    other = outcome(kernel.load)
    left = sorted(str(p) for p in Path(os.environ["KERNELS_CACHE"]).rglob("*"))
    os.environ["MOK_TRUST_KERNEL"] = "mok-hf/mok"
    result = train(checkpoint)
    info = kernel.info()
    return result | {
        "refused": refused,
        "other": other,
        "left": left,
        "package": mok_hf.__file__,
        "source": info.source,
        "path": str(info.path),
    }


def offline(checkpoint):
    """Without a connection and without being told again; then with a changed file."""
    import kernels

    from mok_hf import kernel

    result = train(checkpoint) | {"source": kernel.info().source}
    result["get_kernel"] = kernels.get_kernel("mok-hf/mok", revision="v1").API_LEVEL
    file = kernel.info().path / "functional.py"
    content = file.read_bytes()
    file.unlink()  # a link to a blob
    file.write_bytes(content + b"\n")
    kernel._loaded = None
    result["tampered"] = outcome(kernel.load)
    return result


def fetch():
    """What one rank of several on a machine does."""
    from mok_hf import hub

    return hub.fetch(trust="mok-hf/mok").commit


def refusals(repositories):
    """What fetching each repository says, and what it leaves in the cache."""
    from mok_hf import hub

    results = {}
    for repo in repositories.split(","):
        cache = Path(os.environ["KERNELS_CACHE"]) / repo.replace("/", "-")
        os.environ["KERNELS_CACHE"], before = str(cache), os.environ["KERNELS_CACHE"]
        error = outcome(lambda repo=repo: hub.fetch(repo, trust=None if "untrusted" in repo else repo))
        left = sorted(p.name for p in cache.rglob("*")) if cache.is_dir() else []
        results[repo] = {"error": error, "left": left, "fetched": hub.fetched(repo) is not None}
        os.environ["KERNELS_CACHE"] = before
    return results


def updates(repo, served):
    """A refused update leaves the kernel that was there; a lock holds a fetch to one commit and its digests."""
    from mok_hf import hub

    good = hub.fetch(repo, trust=repo)
    lock = Path(os.environ["KERNELS_CACHE"]) / "mok-kernel.lock"
    good.write(lock)
    locked = hub.fetch(repo, trust=repo, locked=hub.Fetched.read(lock)) == good
    other = replace(good, digests=dict.fromkeys(good.digests, "0" * 64))
    differs = outcome(lambda: hub.fetch(repo, trust=repo, locked=other))
    file = next(Path(served).glob("build/*/functional.py"))
    file.write_bytes(file.read_bytes() + b"\n")
    update = outcome(lambda: hub.fetch(repo, trust=repo, refresh=True))
    return {"locked": locked, "differs": differs, "update": update, "kept": hub.fetched(repo) == good}


def refusals_and_updates(repositories, repo, served):
    """Both in one process, which takes long to start."""
    return refusals(repositories) | {"updates": updates(repo, served)}


def wheel(checkpoint):
    """With the kernel's wheel installed beside the package."""
    from mok_hf import kernel

    info = kernel.info()
    return train(checkpoint) | {"source": info.source, "path": str(info.path), "digest": info.digest}


def commands(folder):
    """`mok-hf kernel` from the first question to a locked fetch: [exit status, output] of each."""
    from typer.testing import CliRunner

    from mok_hf.cli import app

    lock = str(Path(folder) / "mok-kernel.lock")
    results = {}
    for name, arguments in {
        "nothing": ["info"],
        "no lock yet": ["lock", lock],
        "untrusted": ["fetch"],
        "fetch": ["fetch", "--trust", "mok-hf/mok"],
        "lock": ["lock", lock],
        "locked": ["fetch", "--lock", lock, "--trust", "mok-hf/mok"],
        "other": ["fetch", "--repo", "a/other", "--trust", "a/other"],
        "info": ["info"],
    }.items():
        done = CliRunner().invoke(app, ["kernel", *arguments])
        results[name] = [done.exit_code, done.output]
    return results | {"lock file": json.loads(Path(lock).read_text())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
