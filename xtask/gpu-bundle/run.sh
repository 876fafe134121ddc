#!/usr/bin/env bash
# Runs the tests of this bundle on this host's GPU. Needs a driver, neither Rust nor network.
#
#   ./run.sh [BINARY...]          every test binary and every example, or the tests named (as in tests/)
#   FILTER=text ./run.sh          the tests whose name contains the text
#   SANITIZE=memcheck ./run.sh    under compute-sanitizer (memcheck, racecheck, initcheck or synccheck):
#                                 the tests whose name contains FILTER; `sanitizer` if it is not set, all if empty
#
# Prints a line per binary, and what an example printed; what a test printed is in logs/. Fails where a binary fails or
# no test ran.
# Besides the tests: bin/gated-delta, and the benches as `benches/NAME --bench`.
set -uo pipefail
cd "$(dirname "$0")" || exit 2

export GATED_DELTA_REQUIRE_GPU=1
export GATED_DELTA_FIXTURES=$PWD/fixtures GATED_DELTA_BIN=$PWD/bin/gated-delta

filter=${FILTER:-}
launcher=()
if [[ -n ${SANITIZE:-} ]]; then
    if ! command -v compute-sanitizer >/dev/null; then
        echo "SANITIZE=$SANITIZE needs compute-sanitizer, which is not on PATH" >&2
        exit 2
    fi
    launcher=(compute-sanitizer --tool "$SANITIZE" --error-exitcode 99)
    filter=${FILTER-sanitizer}
fi

names=("$@")
if ((${#names[@]} == 0)); then
    names=(tests/*)
    names=("${names[@]#tests/}")
fi

mkdir -p logs
failed=0
tests=0
binaries=0

# run NAME COMMAND...
run() {
    local log=logs/$1.log begin=$SECONDS status passed verdict=ok
    "${launcher[@]}" "${@:2}" >"$log" 2>&1
    status=$?
    passed=$(sed -n 's/^test result:.* \([0-9]*\) passed;.*/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    binaries=$((binaries + 1))
    tests=$((tests + passed))
    if ((status != 0)); then
        verdict=FAILED
        failed=$((failed + 1))
    fi
    printf '%-6s  %-40s %4d passed  %4d s\n' "$verdict" "$1" "$passed" $((SECONDS - begin))
    if ((status != 0)); then
        echo "        exit status $status; the end of $log:"
        tail -n 40 "$log" | sed 's/^/        /'
    fi
    return "$status"
}

for name in "${names[@]}"; do
    run "$name" "tests/$name" ${filter:+"$filter"}
done
if (($# == 0)) && [[ -z $filter && -z ${SANITIZE:-} ]]; then
    for example in examples/*; do
        name=${example#examples/}
        run "$name" "$example" && sed 's/^/        /' "logs/$name.log"
    done
fi

echo "$binaries binaries, $failed failed; $tests tests passed"
if ((tests == 0)); then
    echo "no test ran" >&2
    exit 1
fi
((failed == 0))
