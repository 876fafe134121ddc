#!/usr/bin/env bash
# Runs the tests of this bundle on this host's GPU, several binaries at a time. Needs a driver, neither Rust nor network.
#
#   ./run.sh [all | NAME...]      everything, or the named tests: a test binary or, of tests-cpu and tests-gpu, which are large, one
#                                 of their modules (tests-laws). `./run.sh list` prints the names
#   FILTER=text ./run.sh          the tests whose name contains the text
#   SANITIZE=all ./run.sh         under compute-sanitizer (all, or some of racecheck, memcheck, initcheck, synccheck):
#                                 the tests whose name contains FILTER; `sanitizer` if it is not set, all if empty.
#                                 First without it: the sanitizers then find the kernels compiled, in cache/
#   ENTRIES=all                   with SANITIZE: launches of every entry, not of one of each kind
#   GATED_DELTA_GPU_SHARE=1       all problems on the GPU, not one in thirteen
#   GATED_DELTA_GPU_TURN=n        which problems are drawn, and which of the fixed ones the GPU takes: 0 to 12 are all. By default
#                                 another one each minute, which is printed
#   GATED_DELTA_SIMULATOR=1       in the simulator too, which has run what is in a bundle before
#   JOBS=n                        processes at a time
#   SHARDS=n                      processes that share the launches of tests-sanitizer, for each sanitizer
#   LIMIT=seconds                 a process that takes longer is ended, and has failed
#   RUST_TEST_THREADS=n           threads of a process; GATED_DELTA_DEPTH and the like reach the tests too
#
# A single test: tests/tests-cpu laws::rows::NAME, with CUDA_CACHE_PATH=$PWD/cache to find what was compiled.
# Prints a line per process as it ends, then what examples printed, the logs of what failed, and totals; all logs are in
# logs/. Fails where a process fails or no test ran.
# Besides the tests: bin/gated-delta, and the benches as `benches/NAME --bench`.
set -uo pipefail
cd "$(dirname "$0")" || exit 2

export GATED_DELTA_REQUIRE_GPU=${GATED_DELTA_REQUIRE_GPU:-1}
export GATED_DELTA_FIXTURES=$PWD/fixtures GATED_DELTA_BIN=$PWD/bin/gated-delta
# The driver's cache of compiled kernels, shared by all processes.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$PWD/cache} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-4294967296}
unset CUDA_CACHE_DISABLE

export GATED_DELTA_SIMULATOR=${GATED_DELTA_SIMULATOR:-0}
export GATED_DELTA_GPU_TURN=${GATED_DELTA_GPU_TURN:-$(($(date +%s) / 60 % 13))}

# Longest first.
LONGEST=(tests-entries tests-families tests-laws tests-replays tests-sanitizer tests-plans tests-prompts tests-models tests-prefill
    tests-large_pool tests-deferred tests-engine cli-cli)
# Binaries of many modules, each of which is a process.
MODULES=(tests-cpu tests-gpu)
# Tests that run while nothing else does: one takes all of the GPU's memory, one compiles on all cores within a limit of time.
ALONE='out_of_memory|the_gpu_passes_in_seconds'
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
    export ENTRIES=${ENTRIES:-kinds}
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

# The tests of a binary that the filter takes.
tests_of() {
    "tests/$1" --list ${filter:+"$filter"} 2>/dev/null | sed -n 's/: test$//p'
}

# The processes to run, one `NAME BINARY` a line, longest first. Each module of a binary in MODULES is a process.
units() {
    local binary
    for binary in tests/*; do
        binary=${binary#tests/}
        if [[ " ${MODULES[*]} " == *" $binary "* ]]; then
            tests_of "$binary" | sed "s/::.*//; s/.*/${binary%%-*}-& $binary/" | sort -u
        elif [[ -z $filter || -n $(tests_of "$binary") ]]; then
            echo "$binary $binary"
        fi
    done | awk -v longest="${LONGEST[*]}" '
        BEGIN { n = split(longest, of, " "); for (i = 1; i <= n; i++) place[of[i]] = i }
        { print ($1 in place) ? place[$1] : n + 1, $0 }
    ' | sort -s -n -k 1,1 | cut -d " " -f 2-
}

# The tests of the unit `NAME BINARY`, where it is a module: libtest takes a filter wherever it stands in a name.
names_of() {
    local module=${1#*-}
    if [[ $1 != "$2" ]]; then
        tests_of "$2" | grep "^$module::"
    fi
}

[[ $* == all ]] && shift
named=$#
mapfile -t all < <(units)
if [[ $* == list ]]; then
    printf '%s\n' "${all[@]%% *}"
    exit
fi
units=("${all[@]}")
if ((named > 0)); then
    units=()
    for name in "$@"; do
        found=0
        for unit in "${all[@]}"; do
            if [[ $name == "${unit% *}" || $name == "${unit#* }" ]]; then
                units+=("$unit")
                found=1
            fi
        done
        if ((found == 0)) && [[ ! -x tests/$name ]]; then
            echo "no tests $name${filter:+ with $filter in their name}; there are ${all[*]%% *}" >&2
            exit 2
        fi
    done
fi

rm -rf logs
mkdir -p logs
: >logs/results

# execute TOOL NAME FILE SHARD PART: one process; `-` stands for none, PART is `alone` for the tests of ALONE and `others` for
# all but these. Adds `STATUS PASSED FAILED SECONDS TOOL NAME` to the results.
execute() {
    local tool=$1 name=$2 file=$3 shard=$4 part=$5 command=() tests=() begin=$SECONDS status child log verdict=ok
    mapfile -t tests < <(names_of "$name" "${file#*/}" | part "$part")
    [[ $part == alone ]] && name+=-alone
    if [[ $tool != - ]]; then
        command=(compute-sanitizer --tool "$tool" --error-exitcode 99)
        # It warns of a mailbox that is opened: of the two instructions of one and the same thread that do it, first the
        # barrier's start, then what it waits for. Races of threads are errors.
        [[ $tool == racecheck ]] && command+=(--racecheck-detect-level error)
        # A thread without a context asks for the id of its own (`Context::enter`), which is an answer. Other errors of calls the
        # tests find themselves.
        [[ $tool == memcheck ]] && command+=(--report-api-errors no)
        name=$tool-$name
    fi
    command+=("./$file")
    if [[ $shard != - ]]; then
        export SHARD=$shard
        name+=-${shard/\//of}
    fi
    if ((${#tests[@]} > 0)); then
        command+=(--exact "${tests[@]}")
    elif [[ $file == tests/* && -n $filter ]]; then
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

# part alone|others|-: filters the test names on stdin: those of ALONE, all others, or all.
part() {
    case $1 in
        alone) grep -E "$ALONE" ;;
        others) grep -Ev "$ALONE" ;;
        *) cat ;;
    esac
}

# pool JOBS 'TOOL NAME FILE SHARD PART'...: runs the processes, JOBS at a time.
pool() {
    local most=$1 job
    for job in "${@:2}"; do
        while (($(jobs -rp | wc -l) >= most)); do
            wait -n
        done
        # shellcheck disable=SC2086 # five words
        execute $job &
    done
    wait
}

# totals TOOL TITLE SECONDS: prints the counts of a tool's processes and tests.
totals() {
    awk -v tool="$1" -v title="$2" -v seconds="$3" '
        $5 == tool { n++; failed += $1 != 0; passed += $2 }
        END { printf "%-12s %3d processes, %d failed; %4d tests passed; %4d s\n", title, n, failed, passed, seconds }
    ' logs/results
}

failures() {
    awk '$1 != 0' logs/results
}

# Prints the end of the log of each failed process, and the first report of a sanitizer.
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

trap 'trap - TERM; kill $(jobs -rp) 2>/dev/null; wait; exit 130' INT TERM

plain=()
for unit in "${units[@]}"; do
    name=${unit% *} binary=${unit#* }
    if [[ -n $(names_of "$name" "$binary" | part alone) ]]; then
        execute - "$name" "tests/$binary" - alone
        [[ -n $(names_of "$name" "$binary" | part others) ]] || continue
        plain+=("- $name tests/$binary - others")
    else
        plain+=("- $name tests/$binary - -")
    fi
done
if ((named == 0)) && [[ -z $filter && ${#tools[@]} == 0 ]]; then
    for example in examples/*; do
        [[ -x $example ]] && plain+=("- ${example#*/} $example - -")
    done
fi
pool "${JOBS:-$(clamp $((cores / 2)) 2 8)}" "${plain[@]}"
plain_seconds=$SECONDS

if ((${#tools[@]} > 0)) && [[ -z $(failures) ]]; then
    sanitized=()
    for tool in "${tools[@]}"; do
        for job in "${plain[@]}"; do
            read -r _ name file _ part <<<"$job"
            if [[ $name == tests-sanitizer ]]; then
                for ((i = 0; i < shards; i++)); do
                    sanitized+=("$tool $name $file $i/$shards $part")
                done
            else
                sanitized+=("$tool $name $file - $part")
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
echo "$verdict in $SECONDS s, with GATED_DELTA_GPU_TURN=$GATED_DELTA_GPU_TURN"
[[ $verdict == passed ]]
