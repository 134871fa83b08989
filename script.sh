#!/usr/bin/env bash
# Download one worker's part of a plan by script.py: resumes, retries, verifies every file.
#
#   bash script.sh [PLAN_DIR/download-K.txt [DEST]]
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="cd scripts && bash script.sh"
#
# The plan defaults to the only plan/download-*.txt, else to the part that script.py noted as this
# host's in plan/worker-HOST, else to that of TPU_WORKER_ID; DEST to data. Interrupted or failed: run
# the same command again. A file gets its name in DEST only after its size and SHA-256 were checked;
# until then it lies in DEST/.unfinished, which goes when all are there. Asks nothing. Exit code 0:
# complete; 1: files are missing, each named; 2: a mistake to put right (no such plan, no aria2c, no
# space); 130, 143: interrupted.
#
# Environment, with what holds when it is not set:
#   HF_TOKEN=           for gated datasets, else that of `hf auth login`; sent to HF_ENDPOINT only
#   HF_ENDPOINT=https://huggingface.co
#   FILES=4             files fetched at a time
#   CONNECTIONS=8       connections for each, at most 16
#   RETRY_WAIT=5        seconds before a retry, doubled after each round that brought nothing
#   MAX_WAIT=300        ... up to this many
#   MAX_ROUNDS=8        rounds on end that bring nothing before it gives up
#   SAVE_EVERY=2        seconds of download that a SIGKILL may lose
#   PROGRESS_EVERY=15   seconds between two lines of progress (1 on a terminal)
#   LOCK_WAIT=60        seconds to wait for what an earlier run left behind in DEST
set -euo pipefail
shopt -s nullglob

host=$(uname -n) # not HOSTNAME, which srun hands on from the login node
prefix="[$host]" nl=$'\n'
say() {
    [ ! -t 1 ] || printf '\r\033[K'
    echo "$prefix $*"
}
fail() {
    say "error: $*" >&2
    exit 2
}
mb() { echo "$(($1 / 1000000)) MB"; }
count_of() { printf '%s\n' "${state[@]-}" | grep -cx "$1" || true; }

# Unlike a plain sleep, ends at once on a signal. Without stderr, where bash would report an aria2c
# that was killed meanwhile.
pause() {
    sleep "$1" >/dev/null 9>&- &
    wait $!
} 2>/dev/null

default_plan() {
    local parts=(plan/download-*.txt)
    if [ ${#parts[@]} -eq 1 ]; then
        echo "${parts[0]}"
    elif [ -f "plan/worker-$host" ]; then
        echo "plan/download-$(<"plan/worker-$host").txt"
    elif [ -n "${TPU_WORKER_ID:-}" ] && [ "${MEGASCALE_NUM_SLICES:-1}" = 1 ]; then
        echo "plan/download-$TPU_WORKER_ID.txt"
    else
        fail "plan/ has ${#parts[@]} parts, and not which is this host's: run script.py here, or" \
            "name the part: bash script.sh plan/download-K.txt"
    fi
}

# Fills urls, names, sizes and sums, by number of the file; empty where the plan says nothing.
read_plan() {
    local line size='' number=0 i=0
    urls=() names=() sizes=() sums=() state=()
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        if [[ $line =~ ^https?:// ]]; then
            i=${#urls[@]}
            urls[i]=$line sizes[i]=$size sums[i]='' state[i]=todo reason[i]='cut off' wrongs[i]=0
            size=
        elif [[ $line =~ ^'# size='([0-9]+)$ ]]; then
            size=${BASH_REMATCH[1]}
        elif [[ $line =~ ^'  out='([^./][^/]*)$ ]]; then
            names[i]=${BASH_REMATCH[1]} partial[i]=$unfinished/${BASH_REMATCH[1]}
        elif [[ $line =~ ^'  checksum=sha-256='([0-9a-f]{64})$ ]]; then
            sums[i]=${BASH_REMATCH[1]}
        elif [[ $line =~ ^('# size='|[^#]) ]]; then
            fail "line $number of $plan is none that script.py writes: $line"
        fi
    done <"$plan"
    count=${#urls[@]}
    [ ${#names[@]} -eq "$count" ] || fail "$plan has $count addresses, but ${#names[@]} names (out=)"
}

# The line of .verified for the file $1 under its final name.
identity() { echo "$(stat -c '%s %.9Y' "$dest/${names[$1]}") ${sums[$1]:--} ${names[$1]}"; }

# What was verified before is done. What changed since is checked as if it had just been downloaded,
# and so is what lies whole in .unfinished, if there is something to check it by.
scan() {
    local verified line
    verified=$nl$(cat "$dest/.verified")$nl
    for ((i = 0; i < count; i++)); do
        if [ -e "$dest/${names[i]}" ]; then
            line=$(identity $i)
            [[ $verified != *"$nl$line$nl"* ]] || { state[i]=done sizes[i]=${line%% *} && continue; }
            mkdir -p "$unfinished"
            rm -f "${partial[i]}.aria2"
            mv -f "$dest/${names[i]}" "$unfinished/"
            [ -z "${sizes[i]}${sums[i]}" ] || state[i]=downloaded
        elif [ -e "${partial[i]}" ] && [ ! -e "${partial[i]}.aria2" ]; then
            [ -z "${sums[i]}" ] || state[i]=downloaded
        fi
    done
}

# Runs in the background, once a file.
check() {
    local size sum
    size=$(stat -c %s "${partial[$1]}") && [ "$size" = "${sizes[$1]:-$size}" ] || return 3
    if [ -n "${sums[$1]}" ]; then
        sum=$(sha256sum <"${partial[$1]}") && [ "${sum%% *}" = "${sums[$1]}" ] || return 4
    fi
    sync "${partial[$1]}" # .verified must not outlive it in a power cut
}

# Acts on the result of the check of file $1.
finish() {
    local status=0
    wait "${checker[$1]}" || status=$?
    progressed=1
    if [ $status = 0 ]; then
        mv -f "${partial[$1]}" "$dest/" 2>/dev/null || fail "cannot write in $dest"
        identity "$1" >&9
        state[$1]=done sizes[$1]=$(stat -c %s "$dest/${names[$1]}")
        return
    fi
    case $status in
        3) reason[$1]="wrong size, $(stat -c %s "${partial[$1]}") and not ${sizes[$1]} bytes" ;;
        4) reason[$1]="wrong SHA-256, not ${sums[$1]}" ;;
        *) reason[$1]="not brought to disk" ;;
    esac
    rm "${partial[$1]}"
    state[$1]=todo
    # What was fetched is fetched a second time, in case it broke on the way.
    [ $rounds = 0 ] || wrongs[$1]=$((wrongs[$1] + 1))
    [ "${wrongs[$1]}" -lt 2 ] || give_up "$1"
}

give_up() { # no further round can bring file $1
    state[$1]=failed
    say "${names[$1]}: ${reason[$1]}; the others go on"
}

# Sends downloaded files to their check and checked ones to their final names; sets unchecked.
sweep() {
    local complete
    # A file of full length without its .aria2 is complete, or was killed before aria2's first
    # record of it: only aria2's word tells these apart.
    complete=$nl$(sed -n 's/.*Download complete: .*\///p' "$log")$nl
    unchecked=0
    for ((i = 0; i < count; i++)); do
        if [[ ${state[i]} = todo && $complete = *"$nl${names[i]}$nl"* ]]; then
            [ ! -e "${partial[i]}" ] || [ -e "${partial[i]}.aria2" ] || state[i]=downloaded
        elif [ "${state[i]}" = checking ] && ! kill -0 "${checker[i]}" 2>/dev/null; then
            finish $i
        fi
        if [ "${state[i]}" = downloaded ] && [ $unchecked -lt "$checkers" ]; then
            check $i &
            checker[i]=$! state[i]=checking
        fi
        [ "${state[i]}" != checking ] || unchecked=$((unchecked + 1))
    done
}
drain() { while sweep && [ $unchecked -gt 0 ]; do pause 0.1; done; }

# Prints the bytes that unfinished files have on disk: there are holes where nothing arrived yet.
on_disk() { echo $(($({ echo 0 && stat -c '%b * %B' "$@" 2>/dev/null || true; } | paste -sd +))); }

# Prints the bytes that are there.
arrived() {
    local bytes=0 others=()
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = done ] && bytes=$((bytes + sizes[i])) || others+=("${partial[i]}")
    done
    echo $((bytes + $(on_disk "${others[@]}")))
}

progress() {
    local now total=0 rate left='?' line
    now=$(arrived)
    for ((i = 0; i < count; i++)); do total=$((total + ${sizes[i]:-0})); done
    rate=$(((now - at_start) / (SECONDS > 0 ? SECONDS : 1)))
    [ $rate -le 0 ] || [ "$now" -gt $total ] || left=$(((total - now) / rate / 60))
    line="$(count_of done)/$count files, $(mb "$now") of $(mb $total), $((rate / 1000000)) MB/s"
    if [ -t 1 ]; then
        printf '\r%s\033[K' "$prefix $line, $left min left"
    else
        say "$line, $left min left"
    fi
}

check_space() {
    local need=0 free paths=()
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" != todo ] || need=$((need + ${sizes[i]:-0})) paths+=("${partial[i]}")
    done
    need=$((need - $(on_disk "${paths[@]}")))
    free=$(df --output=avail -B1 "$dest" | tail -n 1)
    [ $need -le "$free" ] || fail "no space in $dest: $(mb $need) are needed, $(mb $free) are free"
}

# aria2 repeats its headers wherever it is redirected to, and the CDN must not see the token. curl
# drops it there; what it is led to is what aria2 gets.
sign_links() {
    local asked=() targets=() links number status target
    for ((i = 0; i < count; i++)); do
        [[ ${state[i]} = todo && ${urls[i]} = "$hub"/* ]] || continue
        asked+=("$i") targets+=("${urls[i]}") link[i]='' reason[i]='no answer from the hub'
    done
    [ ${#asked[@]} -gt 0 ] || return 0
    links=$(mktemp "$unfinished/.links.XXXXXX") # its mode is 600
    printf 'Authorization: Bearer %s\n' "$token" | curl -qgsILZ --parallel-max 16 \
        --connect-timeout 10 -m 60 -H @- -w '\n=> %{urlnum} %{http_code} %{url_effective}\n' \
        "${targets[@]}" >"$links" 2>/dev/null 9>&- &
    child=$!
    wait $child || true # each link has its own status
    child=
    while read -r number status target; do
        i=${asked[number]}
        if [[ $status = 200 || $target != "$hub"/* ]]; then
            link[i]=$target reason[i]='cut off'
            continue
        fi
        [ "$status" = 000 ] || reason[i]="the hub answers $status to this HF_TOKEN"
        trouble=${reason[i]}
        case $status in 401 | 403 | 404) give_up "$i" ;; esac
    done < <(sed -n 's/^=> //p' "$links")
    rm "$links"
}

# One aria2 over all that is missing. It holds the lock too, and ends when this script is gone.
fetch() {
    local shown=$SECONDS status=0 url why
    link=("${urls[@]}")
    [ -z "$token" ] || sign_links
    rounds=$((rounds + 1))
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = todo ] && [ -n "${link[i]}" ] || continue
        [ -e "${partial[i]}.aria2" ] || rm -f "${partial[i]}"
        printf '%s\n  out=%s\n' "${link[i]}" "${names[i]}"
        [[ -z $token || ${link[i]} != "$hub"/* ]] || # what the hub itself sends
            printf '  header=Authorization: Bearer %s\n' "$token"
    done | aria2c --no-conf --no-netrc --input-file=- --dir="$unfinished" --continue \
        --max-concurrent-downloads="$files" --split="$connections" --min-split-size=1M \
        --max-connection-per-server="$connections" --file-allocation=none \
        --auto-file-renaming=false --auto-save-interval="$save_every" --retry-wait="$retry_wait" \
        --stop-with-process=$$ --console-log-level=notice --enable-color=false \
        --show-console-readout=false --summary-interval=0 --download-result=hide >"$log" 2>&1 &
    child=$!
    while kill -0 $child 2>/dev/null; do
        pause 0.5
        sweep
        [ $((SECONDS - shown)) -lt "$progress_every" ] || { progress && shown=$SECONDS; }
    done
    wait $child 2>/dev/null || status=$?
    child=
    [ $status != 28 ] || fail "aria2c: $(head -n 3 "$log" | tr '\n' ' ')"
    drain
    # Its exit code is that of the last error only; the log has one for each file.
    while read -r url status why; do
        for ((i = 0; i < count; i++)); do
            [ "${state[i]}" = todo ] && [ "${link[i]}" = "$url" ] || continue
            reason[i]="$why (aria2 error $status)" trouble=$why
            [[ $status != 24 || ${urls[i]} != "$hub"/* ]] ||
                reason[i]="the hub answers 401: a gated dataset wants HF_TOKEN"
            case $status in 3 | 24) give_up $i ;; esac
        done
    done < <(awk '
        / Download aborted. URI=/ { url = $0; sub(/.* URI=/, "", url) }
        /^  -> .* errorCode=[0-9]/ { sub(/.* errorCode=/, ""); print url, $0 }
    ' "$log")
}

# Rounds of aria2 until nothing is missing that may still come.
download() {
    local idle=0 delay=$retry_wait before trouble
    while [ "$(count_of todo)" -gt 0 ] && [ $idle -lt "$max_rounds" ]; do
        check_space
        if [ $rounds -gt 0 ]; then
            say "$(count_of todo) files are still to come ($trouble); next try in $delay s"
            pause "$delay"
        fi
        before=$(arrived) progressed=0 trouble='cut off'
        fetch
        idle=$((idle + 1)) delay=$((delay * 2 < max_wait ? delay * 2 : max_wait))
        [ $progressed = 0 ] && [ "$(arrived)" -le "$before" ] || { idle=0 && delay=$retry_wait; }
    done
}

stop() {
    trap '' INT TERM HUP
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null || true
    rm -f "$unfinished"/.links.*
    say "interrupted; the same command resumes"
    exit "$1"
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
fi
[ $# -le 2 ] || fail "too many arguments; see bash script.sh --help"
hub=${HF_ENDPOINT:-https://huggingface.co}
token=${HF_TOKEN:-$(cat "${HF_HOME:-${HOME:-}/.cache/huggingface}/token" 2>/dev/null || true)}
hub=${hub%/}
unset HF_TOKEN
files=${FILES:-4} connections=${CONNECTIONS:-8} save_every=${SAVE_EVERY:-2}
retry_wait=${RETRY_WAIT:-5} max_wait=${MAX_WAIT:-300} max_rounds=${MAX_ROUNDS:-8}
progress_every=${PROGRESS_EVERY:-15}
[ ! -t 1 ] || progress_every=1
checkers=$(nproc) child='' rounds=0

plan=${1:-$(default_plan)} dest=${2:-data}
unfinished=$dest/.unfinished log=$dest/.unfinished/.aria2.log
trap 'stop 130' INT
trap 'stop 143' TERM HUP
k=${plan##*/download-}
[ "$k" = "$plan" ] || prefix="[$host worker ${k%.txt}]"
command -v aria2c >/dev/null ||
    fail "aria2c is not installed: sudo apt-get install aria2 (setup-tpu-vm.sh does it)"
[ -z "$token" ] || command -v curl >/dev/null ||
    fail "a token of the hub wants curl: sudo apt-get install curl"
[ -f "$plan" ] || fail "no such plan: $plan; make one: python script.py --dataset NAME"
read_plan
mkdir -p "$dest" 2>/dev/null || fail "cannot make the folder $dest"
{ exec 9>>"$dest/.verified"; } 2>/dev/null || fail "cannot write in $dest"
if ! flock -n 9; then
    say "waiting for what still runs on $dest"
    flock -w "${LOCK_WAIT:-60}" 9 >/dev/null & wait $! || fail "another script.sh is busy in $dest"
fi

scan
if [ "$(count_of done)" -lt "$count" ]; then
    mkdir -p "$unfinished"
    touch "$log" && chmod 600 "$log" # it has signed links
    drain
fi
at_start=$(arrived) SECONDS=0
download

for ((i = 0; i < count; i++)); do
    [ "${state[i]}" = done ] || say "missing: ${names[i]}: ${reason[i]}" >&2
done
[ "$(count_of done)" -eq "$count" ] || {
    say "$(count_of done) of $count files are complete; the same command tries again" >&2
    exit 1
}
planned=$(printf '%s/' '' "${names[@]}") others='' unsummed=0
for ((i = 0; i < count; i++)); do
    rm -f "${partial[i]}".aria2*
    [ -n "${sums[i]}" ] || unsummed=$((unsummed + 1))
done
rm -f "$log" "$unfinished"/.links.*
[ ! -d "$unfinished" ] || rmdir "$unfinished" 2>/dev/null ||
    say "$unfinished has files of another plan: finish that one, or remove them"
for file in "$dest"/*.parquet; do
    [[ $planned = */"${file##*/}"/* ]] || others+=" ${file##*/}"
done
[ -z "$others" ] || say "not in $plan, but the loader takes every *.parquet in $dest:$others"
bytes=$(arrived) seconds=$((SECONDS > 0 ? SECONDS : 1)) verified='all verified'
[ $unsummed = 0 ] || verified="$unsummed of them without a checksum"
say "complete: $count files, $(mb "$bytes"), $verified; fetched $(mb $((bytes - at_start)))" \
    "in $SECONDS s, $(((bytes - at_start) / seconds / 1000000)) MB/s"
