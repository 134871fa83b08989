#!/usr/bin/env bash
# Download one worker's part of a plan by script.py: resumes, retries, verifies every file.
#
#   bash script.sh [PLAN_DIR/download-K.txt [DEST]]
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="cd scripts && bash script.sh"
#
# The plan defaults to plan/download-K.txt with K of this TPU VM worker, DEST to data. Interrupted
# or failed: run the same command again. A file gets its name in DEST only after its size and
# SHA-256 were checked; until then it lies in DEST/.unfinished, which goes when all are there.
# Asks nothing. Exit code 0: complete; 1: files are missing, each named; 2: a mistake to put right
# (no such plan, no aria2c, no space); 130, 143: interrupted.
#
# Environment, with what holds when it is not set:
#   HF_TOKEN=           for gated datasets, else that of `hf auth login`; sent to HF_ENDPOINT only,
#                       never to where it redirects
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

prefix="[$(hostname)]"
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

# Prints the plan of this worker.
default_plan() {
    local plans=(plan/download-*.txt) k=${TPU_WORKER_ID:-}
    local metadata=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1
    if [ -z "$k" ] && [ ${#plans[@]} -eq 1 ]; then
        echo "${plans[0]}"
        return
    fi
    [ -n "$k" ] || k=$(curl -qsf -m 3 -H 'Metadata-Flavor: Google' \
        "$metadata/instance/attributes/agent-worker-number" 2>/dev/null) ||
        fail "plan/ has ${#plans[@]} parts and this is no TPU VM worker; name one of them"
    echo "plan/download-$k.txt"
}

# Fills urls, names, sizes and sums, by number of the file; empty where the plan says nothing.
read_plan() {
    local line size='' number=0
    urls=() names=() sizes=() sums=() state=()
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        case $line in
            '# size='*[!0-9]*) fail "line $number of $plan has no number of bytes: $line" ;;
            '# size='*) size=${line#*=} ;;
            '#'* | '') ;;
            http://* | https://*)
                i=${#urls[@]}
                urls[i]=$line names[i]='' sizes[i]=$size sums[i]=''
                state[i]=todo reason[i]='cut off' wrongs[i]=0
                size=
                ;;
            '  out=' | '  out=.'* | '  out='*/*)
                fail "line $number of $plan is no file name: $line"
                ;;
            '  out='*) names[i]=${line#*=} ;;
            '  checksum=sha-256='*) sums[i]=${line##*=} ;;
            *) fail "line $number of $plan is none that script.py writes: $line" ;;
        esac
    done <"$plan"
    count=${#urls[@]}
    for ((i = 0; i < count; i++)); do
        [ -n "${names[i]}" ] || fail "$plan has no out= for ${urls[i]}"
    done
}

# The line of .verified for the file $1 under its final name.
identity() { echo "$(stat -c '%s %.9Y' "$dest/${names[$1]}") ${sums[$1]:--} ${names[$1]}"; }

# What was verified before is done. What changed since is checked as if it had just come, and so is
# what lies whole in .unfinished.
take_stock() {
    local verified line nl=$'\n'
    verified=$nl$(cat "$dest/.verified")$nl
    for ((i = 0; i < count; i++)); do
        if [ -e "$dest/${names[i]}" ]; then
            line=$(identity $i)
            case $verified in
                *"$nl$line$nl"*) state[i]=done sizes[i]=${line%% *} && continue ;;
            esac
            mkdir -p "$unfinished"
            rm -f "$unfinished/${names[i]}.aria2"
            mv -f "$dest/${names[i]}" "$unfinished/"
            state[i]=came
        elif [ -e "$unfinished/${names[i]}" ] && [ ! -e "$unfinished/${names[i]}.aria2" ]; then
            [ -z "${sums[i]}" ] || state[i]=came
        fi
    done
}

# Runs in the background, once a file.
check() {
    local file=$unfinished/${names[$1]} sum
    [ "$(stat -c %s "$file")" = "${sizes[$1]:-$(stat -c %s "$file")}" ] || return 3
    [ -n "${sums[$1]}" ] || return 0
    sum=$(sha256sum <"$file") && [ "${sum%% *}" = "${sums[$1]}" ] || return 4
}

# Acts on the result $2 of the check of file $1.
finish() {
    local file=$unfinished/${names[$1]}
    progressed=1
    if [ "$2" = 0 ]; then
        mv -f "$file" "$dest/" 2>/dev/null || fail "cannot write in $dest"
        identity "$1" >&9
        state[$1]=done sizes[$1]=$(stat -c %s "$dest/${names[$1]}")
        return
    fi
    reason[$1]="wrong SHA-256, not ${sums[$1]}"
    [ "$2" = 4 ] || reason[$1]="wrong size, $(stat -c %s "$file") and not ${sizes[$1]} bytes"
    rm "$file"
    state[$1]=todo
    # What was fetched is fetched a second time, in case it broke on the way.
    [ $rounds = 0 ] || wrongs[$1]=$((wrongs[$1] + 1))
    [ "${wrongs[$1]}" -lt 2 ] || lose "$1"
}

lose() { # no further round can bring file $1
    state[$1]=lost
    say "${names[$1]}: ${reason[$1]}; the others go on"
}

# Sends files that came to their check and checked ones to their final names; sets unchecked.
sweep() {
    local complete status nl=$'\n'
    # A file without its .aria2 has come, or was allocated at full length and killed before aria2's
    # first record of it: only aria2's word tells these apart.
    complete=$nl$(sed -n 's/.*Download complete: .*\///p' "$unfinished/aria2.log")$nl
    unchecked=0
    for ((i = 0; i < count; i++)); do
        case ${state[i]}$complete in
            todo*"$nl${names[i]}$nl"*)
                [ ! -e "$unfinished/${names[i]}" ] || [ -e "$unfinished/${names[i]}.aria2" ] ||
                    state[i]=came
                ;;
            checking*)
                if ! kill -0 "${checker[i]}" 2>/dev/null; then
                    status=0
                    wait "${checker[i]}" || status=$?
                    finish $i $status
                fi
                ;;
        esac
        if [ "${state[i]}" = came ] && [ $unchecked -lt "$checkers" ]; then
            check $i &
            checker[i]=$! state[i]=checking
        fi
        [ "${state[i]}" != checking ] || unchecked=$((unchecked + 1))
    done
}
drain() {
    sweep
    while [ $unchecked -gt 0 ]; do
        pause 0.1
        sweep
    done
}

# Prints the bytes that are there. What is on the way is allocated at full length, so that aria2's
# own record has to be read: big-endian, a bit per finished piece, then one per 16 KiB of open ones.
arrived() {
    local bytes=0
    for ((i = 0; i < count; i++)); do
        case ${state[i]} in
            done) bytes=$((bytes + sizes[i])) ;;
            came | checking) bytes=$((bytes + $(stat -c %s "$unfinished/${names[i]}"))) ;;
        esac
    done
    for ((i = 0; i < count; i++)); do
        [ ! -e "$unfinished/${names[i]}.aria2" ] ||
            od -An -v -tu1 -w1048576 "$unfinished/${names[i]}.aria2" 2>/dev/null || true
    done | awk -v bytes=$bytes '
        function number(k) { for (v = 0; k-- > 0;) v = v * 256 + $(++at); return v }
        function ones(k) {
            for (n = 0; k-- > 0;) for (v = $(++at); v > 0; v = int(v / 2)) n += v % 2
            return n
        }
        {
            at = 10; piece = number(4); total = number(8); number(8)
            here = piece * ones(number(4))
            for (open = number(4); open > 0; open--) { number(8); here += 16384 * ones(number(4)) }
            bytes += here < total ? here : total
        }
        END { printf "%.0f\n", bytes }'
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
    local need=0 free
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = todo ] || continue
        need=$((need + ${sizes[i]:-0}))
        [ ! -e "$unfinished/${names[i]}" ] ||
            need=$((need - $(stat -c '%b * %B' "$unfinished/${names[i]}")))
    done
    free=$(df --output=avail -B1 "$dest" | tail -n 1)
    [ $need -le "$free" ] || fail "no space in $dest: $(mb $need) are needed, $(mb $free) are free"
}

# aria2 repeats its headers wherever it is redirected to, and the CDN must not see the token. curl
# drops it there; what it is led to is what aria2 gets.
sign_links() {
    local asked=() targets=() status target
    for ((i = 0; i < count; i++)); do
        case ${state[i]}${urls[i]} in
            todo"$hub"/*)
                asked+=("$i") targets+=("${urls[i]}")
                link[i]='' reason[i]='no answer from the hub'
                ;;
        esac
    done
    [ ${#asked[@]} -gt 0 ] || return 0
    while read -r status target; do
        i=${asked[0]} asked=("${asked[@]:1}")
        if [ "$status" = 200 ] || [ "${target#"$hub/"}" = "$target" ]; then
            link[i]=$target reason[i]='cut off'
            continue
        fi
        reason[i]="the hub answers $status to this HF_TOKEN" trouble=${reason[i]}
        case $status in 401 | 403 | 404) lose "$i" ;; esac
    done < <(printf 'Authorization: Bearer %s\n' "$token" |
        curl -qgsIL --fail-early --connect-timeout 30 -m 60 -H @- \
            -w '\n=> %{http_code} %{url_effective}\n' \
            "${targets[@]}" | sed -n 's/^=> //p')
}

# One aria2 over all that is missing. It holds the lock too, and ends when this script is gone.
fetch() {
    local shown=$SECONDS status=0 url why
    link=("${urls[@]}")
    [ -z "$token" ] || sign_links
    rounds=$((rounds + 1))
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = todo ] && [ -n "${link[i]}" ] || continue
        [ -e "$unfinished/${names[i]}.aria2" ] || rm -f "$unfinished/${names[i]}"
        printf '%s\n  out=%s\n' "${link[i]}" "${names[i]}"
    done | aria2c --no-conf --no-netrc --input-file=- --dir="$unfinished" --continue \
        --max-concurrent-downloads="$files" --split="$connections" --min-split-size=1M \
        --max-connection-per-server="$connections" --file-allocation=$allocation \
        --auto-file-renaming=false --auto-save-interval="$save_every" --retry-wait="$retry_wait" \
        --stop-with-process=$$ --console-log-level=notice --enable-color=false \
        --show-console-readout=false --summary-interval=0 --download-result=hide \
        >"$unfinished/aria2.log" 2>&1 &
    aria2=$!
    while kill -0 $aria2 2>/dev/null; do
        pause 0.5
        sweep
        [ $((SECONDS - shown)) -lt "$progress_every" ] || { progress && shown=$SECONDS; }
    done
    wait $aria2 2>/dev/null || status=$?
    aria2=
    [ $status != 28 ] || fail "aria2c: $(head -n 3 "$unfinished/aria2.log" | tr '\n' ' ')"
    drain
    # Its exit code is that of the last error only; the log has one for each file.
    while read -r url status why; do
        for ((i = 0; i < count; i++)); do
            [ "${state[i]}" = todo ] && [ "${link[i]}" = "$url" ] || continue
            reason[i]="$why (aria2 error $status)" trouble=$why
            case $status in
                3) lose $i ;;
                24) reason[i]="the hub answers 401: a gated dataset wants HF_TOKEN" && lose $i ;;
            esac
        done
    done < <(awk '
        / Download aborted. URI=/ { url = $0; sub(/.* URI=/, "", url) }
        /^  -> .* errorCode=[0-9]/ { sub(/.* errorCode=/, ""); print url, $0 }
    ' "$unfinished/aria2.log")
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
    [ -z "$aria2" ] || { kill "$aria2" && wait "$aria2"; } 2>/dev/null || true
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
checkers=$(nproc) aria2='' rounds=0
trap 'stop 130' INT
trap 'stop 143' TERM HUP

plan=${1:-$(default_plan)} dest=${2:-data} unfinished=${2:-data}/.unfinished
k=${plan##*/download-}
[ "$k" = "$plan" ] || prefix="[$(hostname) worker ${k%.txt}]"
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

take_stock
at_start=$(arrived) SECONDS=0
if [ "$(count_of done)" -lt "$count" ]; then
    mkdir -p "$unfinished" && touch "$unfinished/aria2.log"
    allocation=falloc
    fallocate -l 1 "$unfinished/.probe" 2>/dev/null || allocation=none # not on every file system
    rm -f "$unfinished/.probe"
    drain
    at_start=$(arrived)
    download
fi

for ((i = 0; i < count; i++)); do
    [ "${state[i]}" = done ] || say "missing: ${names[i]}: ${reason[i]}" >&2
done
[ "$(count_of done)" -eq "$count" ] || {
    say "$(count_of done) of $count files are complete; the same command tries again" >&2
    exit 1
}
for ((i = 0; i < count; i++)); do rm -f "$unfinished/${names[i]}".aria2*; done
rm -f "$unfinished/aria2.log"
[ ! -d "$unfinished" ] || rmdir "$unfinished" 2>/dev/null ||
    say "$unfinished has files of another plan: finish that one, or remove them"
bytes=$(arrived) seconds=$((SECONDS > 0 ? SECONDS : 1))
say "complete: $count files, $(mb "$bytes"), all verified; fetched $(mb $((bytes - at_start)))" \
    "in $SECONDS s, $(((bytes - at_start) / seconds / 1000000)) MB/s"
