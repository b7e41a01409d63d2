#!/bin/sh
# The image's RUN steps, so that CI runs the very same commands without Docker.
#   install.sh dependencies cpu|cuda PREFIX    a virtual environment with all that kvferry needs, torch first
#   install.sh package cpu|cuda PREFIX         kvferry itself
# Run from the root of the source. TORCH_INDEX is where torch for CPU comes from; empty = pip's usual index.
set -eu

step=$1 variant=$2 prefix=$3
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

case "$step-$variant" in
dependencies-cpu | dependencies-cuda)
	python3 -m venv "$prefix"
	torch=$(grep '^torch==' constraints.txt)
	if [ "$variant" = cpu ] && [ -n "${TORCH_INDEX:-}" ]; then
		pip install --index-url "$TORCH_INDEX" "$torch" # the usual index has the CUDA build, gigabytes larger
	else
		pip install "$torch"
	fi
	"$prefix/bin/python" - "$variant" >"$prefix/requirements.txt" <<-'PYTHON'
		import sys, tomllib
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]
		extras = project["optional-dependencies"]
		nixl = "nixl-cu13" if sys.argv[1] == "cuda" else "nixl"  # the usual index has torch for CUDA 13
		print(*project["dependencies"], *extras[nixl], *extras["redis"], *extras["otel"], *extras["vision"], sep="\n")
	PYTHON
	pip install --constraint constraints.txt --requirement "$prefix/requirements.txt"
	;;
package-cpu | package-cuda)
	pip install --constraint constraints.txt --no-deps .
	"$prefix/bin/kvferry" version
	"$prefix/bin/python" -c 'from core.multilinear import compiled_library; assert compiled_library(), "is there a C compiler?"'
	;;
*)
	echo "install.sh: no step $step for $variant" >&2
	exit 2
	;;
esac
