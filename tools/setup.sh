#!/bin/sh
# Make $VENV with titan-tune and everything a search and the tests need, at the tested versions.
# Where $PYTHON already has a CUDA (or ROCm) torch >= 2.11, that torch is kept and used.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
cd "$(dirname "$0")/.."

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "titan-tune needs Python 3.11 or newer; $PYTHON is $("$PYTHON" -V 2>&1). Set PYTHON=..." >&2
    exit 2
}

constraints=constraints.txt
if "$PYTHON" - <<'EOF' 2>/dev/null
import re, sys, torch
version = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))
sys.exit(not (version >= (2, 11) and (torch.version.cuda or torch.version.hip)))
EOF
then
    echo "using the torch that $PYTHON has"
    "$PYTHON" -m venv --system-site-packages "$VENV"
    constraints=$VENV/constraints.txt
    grep -Ev '^(torch|triton|numpy)==' constraints.txt > "$constraints"
else
    "$PYTHON" -m venv "$VENV"
fi
"$VENV/bin/python" -m pip install --disable-pip-version-check -q -c "$constraints" -e '.[probe,dev]'
