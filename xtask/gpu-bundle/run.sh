#!/usr/bin/env bash
# Runs the tests of this bundle on this host's GPU, several binaries at a time. Needs a driver, neither Rust nor network.
#
#   ./run.sh [all | BINARY...]    every test binary and every example, or the tests named (as in tests/)
#   FILTER=text ./run.sh          the tests whose name contains the text
#   SANITIZE=all ./run.sh         under compute-sanitizer (all, or some of racecheck, memcheck, initcheck, synccheck):
#                                 the tests whose name contains FILTER; `sanitizer` if it is not set, all if empty.
#                                 First without it: the sanitizers then find the kernels compiled, in cache/
#   JOBS=n                        processes at a time
#   SHARDS=n                      processes that share the launches of tests-sanitizer, for each sanitizer
#   LIMIT=seconds                 a process that takes longer is ended, and has failed
#   RUST_TEST_THREADS=n           threads of a process; PROPTEST_CASES and the like reach the tests too
#
# Prints a line per process as it ends, then what examples printed, the logs of what failed, and totals; all logs are in
# logs/. Fails where a process fails or no test ran.
# Besides the tests: bin/gated-delta, and the benches as `benches/NAME --bench`.
set -uo pipefail
cd "$(dirname "$0")" || exit 2

export GATED_DELTA_REQUIRE_GPU=${GATED_DELTA_REQUIRE_GPU:-1}
export GATED_DELTA_FIXTURES=$PWD/fixtures GATED_DELTA_BIN=$PWD/bin/gated-delta
# What the driver compiled, for whoever loads the same text again.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$PWD/cache} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
unset CUDA_CACHE_DISABLE

# Longest first.
LONGEST=(tests-gpu tests-laws tests-kda_recurrent tests-gdn_mtp tests-gdn_decode tests-sanitizer tests-families tests-engine)
# Takes all of the GPU's memory, and so runs while nothing else does.
ALONE=tests-faults
TOOLS=(racecheck memcheck initcheck synccheck)

# clamp VALUE LEAST MOST
clamp() {
    echo $(($1 < $2 ? $2 : $1 > $3 ? $3 : $1))
}

cores=$(nproc)
limit=${LIMIT:-540}
tools=()
filter=${FILTER:-}
if [[ -n ${SANITIZE:-} ]]; then
    filter=${FILTER-sanitizer}
    if ! command -v compute-sanitizer >/dev/null; then
        echo "SANITIZE=$SANITIZE needs compute-sanitizer, which is not on PATH" >&2
        exit 2
    fi
    for tool in "${TOOLS[@]}"; do
        [[ $SANITIZE == all || " ${SANITIZE//,/ } " == *" $tool "* ]] && tools+=("$tool")
    done
    for tool in ${SANITIZE//,/ }; do
        if [[ " all ${TOOLS[*]} " != *" $tool "* ]]; then
            echo "SANITIZE: wanted all or some of ${TOOLS[*]}, got $tool" >&2
            exit 2
        fi
    done
fi
shards=${SHARDS:-$(clamp $((cores / 4)) 1 4)}

[[ $* == all ]] && shift
named=$#
names=("$@")
if ((named == 0)); then
    names=()
    for name in "${LONGEST[@]}" tests/*; do
        name=${name#tests/}
        [[ -e tests/$name && " ${names[*]-} " != *" $name "* ]] && names+=("$name")
    done
fi
for name in "${names[@]}"; do
    if [[ ! -x tests/$name ]]; then
        echo "no test binary $name; there are $(cd tests && echo *)" >&2
        exit 2
    fi
done

rm -rf logs
mkdir -p logs
: >logs/results

# execute TOOL FILE SHARD: one process; `-` stands for none. Adds `STATUS PASSED FAILED SECONDS TOOL NAME` to the results.
execute() {
    local tool=$1 file=$2 shard=$3 name=${2#*/} command=() begin=$SECONDS status child log verdict=ok
    if [[ $tool != - ]]; then
        command=(compute-sanitizer --tool "$tool" --error-exitcode 99)
        # It warns of a mailbox that is opened: of the two instructions of one and the same thread that do it, first the
        # barrier's start, then what it waits for. Races of threads are errors.
        [[ $tool == racecheck ]] && command+=(--racecheck-detect-level error)
        name=$tool-$name
    fi
    command+=("./$file")
    if [[ $shard != - ]]; then
        export SHARD=$shard
        name+=-${shard/\//of}
    fi
    if [[ $file == tests/* && -n $filter ]]; then
        command+=("$filter")
    fi
    log=logs/$name.log
    timeout --kill-after=10 "$limit" "${command[@]}" >"$log" 2>&1 &
    child=$!
    trap 'kill "$child" 2>/dev/null' TERM
    wait "$child"
    status=$?
    local counts passed failed
    counts=$(sed -n 's/^test result:.* \([0-9]*\) passed; \([0-9]*\) failed;.*/\1 \2/p' "$log" |
        awk '{ p += $1; f += $2 } END { print p + 0, f + 0 }')
    read -r passed failed <<<"$counts"
    ((status == 0)) || verdict=FAILED
    printf '%-6s  %-48s %4d passed %3d failed %4d s\n' "$verdict" "$name" "$passed" "$failed" $((SECONDS - begin))
    printf '%d %d %d %d %s %s\n' "$status" "$passed" "$failed" $((SECONDS - begin)) "$tool" "$name" >>logs/results
}

# pool JOBS 'TOOL FILE SHARD'...: so many at a time.
pool() {
    local most=$1 job
    for job in "${@:2}"; do
        while (($(jobs -rp | wc -l) >= most)); do
            wait -n
        done
        # shellcheck disable=SC2086 # three words
        execute $job &
    done
    wait
}

# totals TOOL TITLE SECONDS
totals() {
    awk -v tool="$1" -v title="$2" -v seconds="$3" '
        $5 == tool { n++; failed += $1 != 0; passed += $2 }
        END { printf "%-12s %3d processes, %d failed; %4d tests passed; %4d s\n", title, n, failed, passed, seconds }
    ' logs/results
}

failures() {
    awk '$1 != 0' logs/results
}

# The end of what failed, and what a sanitizer said first.
print_failures() {
    local status name
    while read -r status _ _ _ _ name; do
        printf '\n== %s: exit status %s' "$name" "$status"
        ((status != 124)) || printf ' (not done after %s s)' "$limit"
        printf '; the end of logs/%s.log:\n' "$name"
        grep -m 30 '^=========' "logs/$name.log"
        tail -n 40 "logs/$name.log"
    done < <(failures)
}

# Whether a test binary has tests of the filter.
has_tests() {
    [[ -z $filter ]] || "tests/$1" --list "$filter" 2>/dev/null | grep -q ': test$'
}

trap 'trap - TERM; kill $(jobs -rp) 2>/dev/null; wait; exit 130' INT TERM

plain=()
for name in "${names[@]}"; do
    has_tests "$name" || continue
    if [[ $name == "$ALONE" ]]; then
        execute - "tests/$name" -
    else
        plain+=("- tests/$name -")
    fi
done
if ((named == 0)) && [[ -z $filter && ${#tools[@]} == 0 ]]; then
    for example in examples/*; do
        [[ -x $example ]] && plain+=("- $example -")
    done
fi
pool "${JOBS:-$(clamp $((cores / 3)) 2 6)}" "${plain[@]}"
plain_seconds=$SECONDS

if ((${#tools[@]} > 0)) && [[ -z $(failures) ]]; then
    sanitized=()
    for tool in "${tools[@]}"; do
        for job in "${plain[@]}"; do
            read -r _ file _ <<<"$job"
            if [[ $file == tests/tests-sanitizer ]]; then
                for ((i = 0; i < shards; i++)); do
                    sanitized+=("$tool $file $i/$shards")
                done
            else
                sanitized+=("$tool $file -")
            fi
        done
    done
    most=${JOBS:-$(clamp "$cores" 1 16)}
    export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(clamp $((2 * cores / most)) 1 8)}
    pool "$most" "${sanitized[@]}"
fi

for example in examples/*; do
    log=logs/${example#examples/}.log
    if [[ -e $log ]]; then
        printf '\n== %s\n' "$example"
        cat "$log"
    fi
done
print_failures

echo
totals - plain "$plain_seconds"
for tool in "${tools[@]}"; do
    totals "$tool" "$tool" "$(awk -v tool="$tool" '$5 == tool && $4 > s { s = $4 } END { print s + 0 }' logs/results)"
done
if ! awk '{ n += $2 } END { exit n == 0 }' logs/results; then
    echo "no test ran" >&2
    exit 1
fi
verdict=passed
[[ -z $(failures) ]] || verdict=FAILED
echo "$verdict in $SECONDS s"
[[ $verdict == passed ]]
