"""Writes the digest of each image beside its tag, so that what runs is what was tested.

    python serving_configs/pin_images.py

A tag can be moved to another image, a digest cannot. The registries are asked by `docker buildx
imagetools inspect`, so this is for a machine with Docker and a way to them, after you put the name
of your registry where registry.example stands. Images that are built locally (vllm-gac:0.1.0 of
docker-compose.yml) have no digest and stay. To take a newer release, change the tag, drop the
digest, and run this again.
"""

import re
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parent
# What stands before the image, the image, and what a digest of it is appended to.
IMAGE = re.compile(
    r"(?P<before>image: |FROM )(?P<image>[\w.-]+(?::\d+)?(?:/[\w.-]+)*:[\w.-]+)$", re.M
)
NAMED = re.compile(
    r"(?P<name>newName: |repository: )(?P<repository>\S+)(?P<between>.*\n +)"
    r"(?P<key>newTag: |tag: )(?P<tag>[\w.-]+)$",
    re.M,
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
FILES = (
    "Dockerfile",
    "docker-compose.yml",
    "k8s/fill-models.yaml",
    "k8s/kustomization.yaml",
    "k8s/production-stack-values.yaml",
)


def main(configs: Path = CONFIGS) -> None:
    """Pin all files, or none if the digest of an image cannot be had.

    Raises:
        SystemExit: a registry was not reached, or does not know an image; with one sentence.
    """
    digests: dict[str, str] = {}
    pinned = {}
    for name in FILES:
        text = (configs / name).read_text()

        def with_digest(match: re.Match[str]) -> str:
            image = match["image"]
            if "/" not in image and image.startswith("vllm-gac:"):
                return match[0]
            return f"{match[0]}@{_digest(image, digests)}"

        def named_with_digest(match: re.Match[str]) -> str:
            digest = _digest(f"{match['repository']}:{match['tag']}", digests)
            start = f"{match['name']}{match['repository']}{match['between']}"
            if match["key"] == "newTag: ":  # kustomize has a field for it
                return f"{start}digest: {digest}  # {match['tag']}"
            return f"{start}{match['key']}{match['tag']}@{digest}"

        pinned[name] = NAMED.sub(named_with_digest, IMAGE.sub(with_digest, text))
    for name, text in pinned.items():
        (configs / name).write_text(text)
    for image, digest in digests.items():
        print(f"{image} is {digest}")


def _digest(image: str, known: dict[str, str]) -> str:
    if image not in known:
        command = ["docker", "buildx", "imagetools", "inspect", image]
        try:
            run = subprocess.run(
                [*command, "--format", "{{.Manifest.Digest}}"],
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
            )
        except FileNotFoundError:
            sys.exit("docker is not on the PATH: run this where Docker is; nothing was changed")
        except subprocess.TimeoutExpired:
            sys.exit(f"{image}: its registry does not answer; nothing was changed")
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.strip().splitlines()[-1:])
            sys.exit(f"{image}: no digest ({said}); nothing was changed")
        if not DIGEST.fullmatch(run.stdout.strip()):
            sys.exit(f"{image}: expected a digest, got {run.stdout.strip()!r}; nothing was changed")
        known[image] = run.stdout.strip()
    return known[image]


if __name__ == "__main__":
    main()
