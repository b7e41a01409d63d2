#!/bin/sh
# The image's RUN steps, so that CI runs the very same commands without Docker.
#   install.sh dependencies VARIANT PREFIX    a virtual environment with what docker/requirements-VARIANT.lock lists, by its sums
#   install.sh package VARIANT PREFIX         kvferry itself, and the list of all that is there: PREFIX/sbom.cdx.json; then no pip
# VARIANT: cpu, cuda, or agent, which has no torch: routers and agents over vLLM engines.
# Run from the root of the source. TORCH_INDEX is where torch for CPU comes from; empty = pip's usual index.
set -eu

step=$1 variant=$2 prefix=$3
lock=docker/requirements-$variant.lock
pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

case "$step-$variant" in
dependencies-cpu | dependencies-cuda | dependencies-agent)
	python3 -m venv "$prefix"
	grep '^torch==' "$lock" >"$prefix/torch.txt" || [ "$variant" = agent ]
	grep -v '^torch==' "$lock" >"$prefix/others.txt"
	if [ "$variant" = agent ]; then
		: # nothing of it computes
	elif [ "$variant" = cpu ] && [ -n "${TORCH_INDEX:-}" ]; then
		pip install --require-hashes --no-deps --index-url "$TORCH_INDEX" --requirement "$prefix/torch.txt"
	else
		pip install --require-hashes --no-deps --requirement "$prefix/torch.txt"
	fi
	pip install --require-hashes --no-deps --requirement "$prefix/others.txt"
	pip check # the list is complete
	rm "$prefix/torch.txt" "$prefix/others.txt"
	;;
package-cpu | package-cuda | package-agent)
	pip install --no-deps --no-build-isolation .
	"$prefix/bin/kvferry" version
	"$prefix/bin/python" -P -c 'from core.multilinear import compiled_library; assert compiled_library(), "is there a C compiler?"'
	"$prefix/bin/python" docker/sbom.py "$lock" >"$prefix/sbom.cdx.json"
	rm -rf "$prefix"/bin/pip* "$prefix"/lib/python3*/site-packages/pip "$prefix"/lib/python3*/site-packages/pip-*.dist-info
	;;
*)
	echo "install.sh: no step $step for $variant" >&2
	exit 2
	;;
esac
