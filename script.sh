#!/usr/bin/env bash
# Download one worker's part of a plan by script.py: resumes, retries, verifies every file.
#
#   bash script.sh [PLAN_DIR/download-K.txt [DEST]]
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="cd scripts && bash script.sh"
#
# The plan defaults to the only plan/download-*.txt, else to the part that script.py noted as this
# host's in plan/worker-HOST, else to that of TPU_WORKER_ID; DEST to data. Asks nothing. Interrupted
# or failed: run the same command again. A file gets its name in DEST only after its size and
# SHA-256 were checked; until then it lies in DEST/.unfinished, which goes when all are there. Exit
# code 0: complete; 1: files are missing, each named; 2: a mistake to put right (no such plan, no
# aria2c, no space); 130, 143: interrupted.
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
say() { [ ! -t 1 ] || printf '\r\033[K' && echo "$prefix $*"; }
fail() { say "error: $*" >&2; exit 2; }
mb() { echo "$(($1 / 1000000)) MB"; }
count_of() { printf '%s\n' "${state[@]-}" | grep -cx "$1" || true; }

# Unlike a plain sleep, ends at once on a signal. Without stderr, where bash would report an aria2c
# that was killed meanwhile.
pause() {
    sleep "$1" >/dev/null 9>&- &
    wait $!
} 2>/dev/null

default_plan() {
    local parts=(plan/download-*.txt) k=
    [ ${#parts[@]} -ne 1 ] || { echo "${parts[0]}" && return; }
    [ ! -f "plan/worker-$host" ] || k=$(<"plan/worker-$host")
    # Several workers on one host would share that note.
    [ "${MEGASCALE_NUM_SLICES:-1}" != 1 ] || k=${TPU_WORKER_ID:-$k}
    [ -n "$k" ] || fail "plan/ has ${#parts[@]} parts, and not which is this host's:" \
        "run script.py here, or name the part: bash script.sh plan/download-K.txt"
    echo "plan/download-$k.txt"
}

# Fills urls, names, sizes and sums, by number of the file; empty where the plan says nothing.
read_plan() {
    local line size='' number=0 i=0
    urls=() names=() sizes=() sums=() state=()
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        if [[ $line =~ ^https?:// ]]; then
            i=${#urls[@]} state[i]=todo reason[i]='cut off' wrongs[i]=0
            urls[i]=$line sizes[i]=$size sums[i]='' size=
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
    [ ${#names[@]} -eq "$count" ] || fail "$plan has $count addresses and ${#names[@]} names (out=)"
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
            [[ $verified = *"$nl$line$nl"* ]] && state[i]=done sizes[i]=${line%% *} && continue
            mkdir -p "$unfinished"
            rm -f "${partial[i]}.aria2" && mv -f "$dest/${names[i]}" "$unfinished/"
            [ -z "${sizes[i]}${sums[i]}" ] || state[i]=downloaded
        elif [[ -n ${sums[i]} && -e ${partial[i]} && ! -e ${partial[i]}.aria2 ]]; then
            state[i]=downloaded
        fi
    done
}

# Runs in the background, once a file: gives it its final name, or says by its status what is wrong.
check() {
    local size sum
    size=$(stat -c %s "${partial[$1]}") && [ "$size" = "${sizes[$1]:-$size}" ] || return 3
    if [ -n "${sums[$1]}" ]; then
        sum=$(sha256sum <"${partial[$1]}") && [ "${sum%% *}" = "${sums[$1]}" ] || return 4
    fi
    # Brought to disk first: .verified must not outlive it in a power cut.
    sync "${partial[$1]}" && mv -f "${partial[$1]}" "$dest/" && identity "$1" >&9
}

# Acts on the result of the check of file $1.
finish() {
    local status=0
    wait "${checker[$1]}" || status=$?
    progressed=1
    case $status in
        0) state[$1]=done sizes[$1]=$(stat -c %s "$dest/${names[$1]}") && return ;;
        3) reason[$1]="wrong size, $(stat -c %s "${partial[$1]}") and not ${sizes[$1]} bytes" ;;
        4) reason[$1]="wrong SHA-256, it should be ${sums[$1]}" ;;
        *) fail "cannot write ${names[$1]} in $dest" ;;
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
drain() { sweep; while [ $unchecked -gt 0 ]; do pause 0.1; sweep; done; }

# Sets total, the bytes of the files that may still be complete, and here, those of them that are on
# disk: unfinished files have holes where nothing arrived yet.
tally() {
    local paths=()
    total=0 here=0
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" != failed ] || continue
        total=$((total + ${sizes[i]:-0}))
        [ "${state[i]}" = done ] && here=$((here + sizes[i])) || paths+=("${partial[i]}")
    done
    here=$((here + $({ echo 0; stat -c '%b * %B' "${paths[@]}" || :; } 2>/dev/null | paste -sd +)))
}

progress() {
    local rate left='?' line
    tally
    rate=$(((here - at_start) / (SECONDS > 0 ? SECONDS : 1)))
    [ $rate -le 0 ] || [ $here -gt $total ] || left=$(((total - here) / rate / 60))
    line="$(count_of done)/$count files, $(mb $here) of $(mb $total), $((rate / 1000000)) MB/s"
    line+=", $left min left"
    if [ -t 1 ]; then printf '\r%s\033[K' "$prefix $line"; else say "$line"; fi
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
    printf 'Authorization: Bearer %s\n' "$token" | curl -qgsIL -H @- -m 60 --connect-timeout 10 \
        -Z --parallel-immediate --parallel-max 16 "${targets[@]}" \
        -w '\n=> %{urlnum} %{http_code} %{url_effective}\n' >"$links" 2>/dev/null 9>&- &
    child=$!
    wait $child || true # each link has its own status
    child=
    while read -r number status target; do
        i=${asked[number]}
        [[ $status = 200 || $target != "$hub"/* ]] &&
            link[i]=$target reason[i]='cut off' && continue
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
            [[ $why != *status=403* || $token || ${urls[i]} != "$hub"/* ]] ||
                reason[i]="the hub answers 403: if the dataset is gated, set HF_TOKEN"
            case $status in 3 | 24) give_up $i ;; esac
        done
    done < <(awk '
        / Download aborted. URI=/ { url = $0; sub(/.* URI=/, "", url) }
        /^  -> .* errorCode=[0-9]/ { sub(/.* errorCode=/, ""); print url, $0 }
    ' "$log")
}

# Rounds of aria2 until nothing is missing that may still come.
download() {
    local idle=0 delay=$retry_wait free before trouble
    while [ "$(count_of todo)" -gt 0 ] && [ $idle -lt "$max_rounds" ]; do
        tally
        free=$(df --output=avail -B1 "$dest" | tail -n 1)
        [ $((total - here)) -le "$free" ] ||
            fail "no space in $dest: $(mb $((total - here))) are needed, $(mb "$free") are free"
        if [ $rounds -gt 0 ]; then
            say "$(count_of todo) files are still to come ($trouble); next try in $delay s"
            pause "$delay"
        fi
        before=$here progressed=0 trouble='cut off'
        fetch
        tally
        idle=$((idle + 1)) delay=$((delay * 2 < max_wait ? delay * 2 : max_wait))
        [ $progressed = 0 ] && [ $here -le "$before" ] || { idle=0 && delay=$retry_wait; }
    done
}

stop() {
    trap '' INT TERM HUP
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null || true
    rm -f "$unfinished"/.links.*
    say "interrupted; the same command resumes"
    exit "$1"
}

case ${1:-} in -h | --help) sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" && exit ;; esac
[ $# -le 2 ] || fail "too many arguments; see bash script.sh --help"
hub=${HF_ENDPOINT:-https://huggingface.co} hub=${hub%/}
token=${HF_TOKEN:-$(cat "${HF_HOME:-${HOME:-}/.cache/huggingface}/token" 2>/dev/null || true)}
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
type aria2c ${token:+curl} >/dev/null 2>&1 ||
    fail "no aria2c, or no curl: sudo apt-get install aria2 curl (setup-tpu-vm.sh does it)"
[ -f "$plan" ] || fail "no such plan: $plan; make one: python script.py --dataset NAME"
read_plan
mkdir -p "$dest" 2>/dev/null || fail "cannot make the folder $dest"
{ exec 9>>"$dest/.verified"; } 2>/dev/null || fail "cannot write in $dest"
flock -n 9 || say "waiting for what still runs on $dest"
flock -w "${LOCK_WAIT:-60}" 9 >/dev/null & wait $! || fail "another script.sh is busy in $dest"

scan
if [ "$(count_of done)" -lt "$count" ]; then
    mkdir -p "$unfinished"
    (umask 077 && touch "$log") # it has signed links
    drain
fi
tally
at_start=$here SECONDS=0
download

planned=$(printf '%s/' '' "${names[@]}") others='' unsummed=0
for ((i = 0; i < count; i++)); do
    [ "${state[i]}" = done ] || { say "missing: ${names[i]}: ${reason[i]}" >&2 && continue; }
    rm -f "${partial[i]}".aria2*
    [ -n "${sums[i]}" ] || unsummed=$((unsummed + 1))
done
[ "$(count_of done)" -eq "$count" ] ||
    { say "$(count_of done) of $count files are complete; run the same command again" >&2; exit 1; }
rm -f "$log" "$unfinished"/.links.*
[ ! -d "$unfinished" ] || rmdir "$unfinished" 2>/dev/null ||
    say "$unfinished has files of another plan: finish that one, or remove the folder;" \
        "until then the loader refuses $dest"
for file in "$dest"/*.parquet; do
    [[ $planned = */"${file##*/}"/* ]] || others+=" ${file##*/}"
done
[ -z "$others" ] || say "not in $plan, but the loader takes every *.parquet in $dest;" \
    "move away what is not to be trained on:$others"
tally
seconds=$((SECONDS > 0 ? SECONDS : 1)) verified='all verified'
[ $unsummed = 0 ] || verified="$unsummed of them without a checksum"
say "complete: $count files, $(mb $here), $verified; fetched $(mb $((here - at_start)))" \
    "in $SECONDS s, $(((here - at_start) / seconds / 1000000)) MB/s"
