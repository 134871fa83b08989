#!/usr/bin/env bash
# Download one worker's files of a plan by script.py: resumes, retries, verifies every file.
#
#   bash script.sh [PLAN_DIR/download-K.txt [DEST]]
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="cd scripts && bash script.sh"
#
# Default plan: the only plan/download-*.txt, else plan/download-K.txt, where K is TPU_WORKER_ID on
# a single slice, else the index in plan/worker-HOST, which script.py writes. Default DEST: data for
# shards, downloads for archives, whose directories are kept.
# Asks no questions. After an interruption or a failure, run the same command again. Files are
# downloaded to DEST/.unfinished and move to DEST after their size and SHA-256 are verified;
# .unfinished is removed at the end. Exit code 0: complete; 1: files are missing, each is named;
# 2: user error (no such plan, no aria2c, no disk space); 130, 143: interrupted.
#
# Environment variables and their defaults:
#   HF_TOKEN=           for gated datasets; sent to the hub only; default: the token of
#                       `hf auth login`, or of the other variables that huggingface_hub reads,
#                       if a python3 has that package
#   HF_ENDPOINT=https://huggingface.co
#   FILES=4             files downloaded in parallel
#   CONNECTIONS=8       connections per file, at most 16
#   RETRY_WAIT=5        seconds before a retry, doubled after each round without progress
#   MAX_WAIT=300        longest pause before a retry, seconds
#   MAX_ROUNDS=8        consecutive rounds without progress before the script gives up
#   SAVE_EVERY=2        seconds between aria2's saves; a SIGKILL loses what arrived since the last
#   PROGRESS_EVERY=15   seconds between progress lines (1 on a terminal)
#   LOCK_WAIT=60        seconds to wait for an earlier run on DEST to end
[ -n "${BASH_VERSION-}" ] || { echo "run it with bash: bash $0" >&2; exit 2; }
set -euo pipefail
shopt -s nullglob

host=$(uname -n) # not $HOSTNAME, which srun copies from the login node
prefix="[$host]" nl=$'\n'
say() { [ ! -t 1 ] || printf '\r\033[K' && echo "$prefix $*"; }
fail() { say "error: $*" >&2; exit 2; }
mb() { echo "$(($1 / 1000000)) MB"; }
count_of() { printf '%s\n' "${state[@]-}" | grep -cx "$1" || true; }

# A sleep that ends at once on a signal, as traps run during wait. stderr is discarded because bash
# would report a killed aria2c on it.
pause() {
    sleep "$1" >/dev/null 9>&- &
    wait $!
} 2>/dev/null

# Prints the hub's address and the token, as huggingface_hub finds them for script.py. Python is the
# active environment's or the one of setup-tpu-vm.sh. Status 1: neither has huggingface_hub.
ask_huggingface_hub() {
    local here=. python status
    [[ ${BASH_SOURCE[0]} != */* ]] || here=${BASH_SOURCE[0]%/*}
    for python in python3 "$here/.venv/bin/python"; do
        status=0
        PYTHONSAFEPATH=1 "$python" -c 'if True:
            from huggingface_hub import constants, get_token
            try:
                token = get_token() or ""
            except OSError:
                raise SystemExit(4)
            print(constants.ENDPOINT, token, sep="\n")' 2>/dev/null || status=$?
        [ $status != 0 ] || return 0
        [ $status != 4 ] || fail "huggingface_hub cannot read the token; hf auth whoami says why"
    done
    return 1
}

default_plan() {
    local plans=(plan/download-*.txt) k=
    [ ${#plans[@]} -ne 1 ] || { echo "${plans[0]}" && return; }
    [ ! -f "plan/worker-$host" ] || k=$(<"plan/worker-$host")
    # Several workers on one host would share that file.
    [ "${MEGASCALE_NUM_SLICES:-1}" != 1 ] || k=${TPU_WORKER_ID:-$k}
    [ -n "$k" ] || fail "plan/ has ${#plans[@]} plans and no index of this host:" \
        "run script.py here, or name a plan: bash script.sh plan/download-K.txt"
    echo "plan/download-$k.txt"
}

# Reads the plan into the arrays urls, names, sizes and sums; unknown values are empty.
read_plan() {
    local line size='' number=0 i=0
    urls=() names=() sizes=() sums=() state=()
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1)) line=${line%$'\r'}
        if [[ $line =~ ^https?:// ]]; then
            i=${#urls[@]} state[i]=pending reason[i]='cut off' failed_checks[i]=0
            urls[i]=$line sizes[i]=$size sums[i]='' size=
        elif [[ $line =~ ^'# size='([0-9]+)$ ]]; then
            size=${BASH_REMATCH[1]}
        elif [[ $line =~ ^'  out='([^./][^/]*(/[^./][^/]*)*)$ ]]; then # no .., nothing hidden
            names[i]=${BASH_REMATCH[1]} partial[i]=$unfinished/${BASH_REMATCH[1]}
        elif [[ $line =~ ^'  checksum=sha-256='([0-9a-f]{64})$ ]]; then
            sums[i]=${BASH_REMATCH[1]}
        elif [[ $line =~ ^('# size='|[^#]) ]]; then
            fail "line $number of $plan is not in script.py's format: $line; make the plan again"
        fi
    done <"$plan"
    count=${#urls[@]}
    [ ${#names[@]} -eq "$count" ] ||
        fail "$plan has $count addresses but ${#names[@]} names (out=);" \
            "make the plan again"
    line=$(printf '%s\n' "${names[@]}" | sort | uniq -d | head -n 1)
    [ -z "$line" ] || fail "$plan has the name $line twice; make the plan again"
}

# The line in .verified for file $1 under its final name.
identity() { echo "$(stat -c '%s %.9Y' "$dest/${names[$1]}") ${sums[$1]:--} ${names[$1]}"; }

# Whether control file $2 of aria2 fits file $1: every field has its length, and the file reaches to
# the end of the last complete piece. With another control file aria2 fails, crashes or hangs.
# Source: aria2 manual, technical notes, "Control File (*.aria2) Format".
fits() {
    local hex piece total pieces bytes bits last at opened index
    [ -f "${partial[$1]}" ] && [ -f "$2" ] || return 1
    hex=$(od -An -v -tx1 "$2" | tr -d ' \n')
    # version, extension, info hash length, piece length, total length, uploaded, bitfield length
    [[ $hex =~ ^0001(0{16})(.{8})(.{16})(.{16})(.{8}) ]] || return 1
    piece=$((16#${BASH_REMATCH[2]})) total=$((16#${BASH_REMATCH[3]}))
    [ $piece -gt 0 ] && [ "$total" = "${sizes[$1]:-$total}" ] || return 1
    pieces=$(((total + piece - 1) / piece)) bytes=$(((pieces + 7) / 8))
    [ $((16#${BASH_REMATCH[5]})) = $bytes ] || return 1
    bits=${hex:68:2*bytes} at=$((68 + 2 * bytes))
    bits=${bits%"${bits##*[^0]}"} last=$((4 * ${#bits})) # the last hexadecimal digit with a bit
    for ((index = 16#0${bits: -1}; index && !(index & 1); index >>= 1)); do last=$((last - 1)); done
    [ $last -le $pieces ] || return 1
    [ "$(stat -c %s "${partial[$1]}")" -ge $((last < pieces ? last * piece : total)) ] || return 1
    # pieces in flight: index, length, length of the bitfield of blocks of 16 KiB, this bitfield
    for ((opened = 16#0${hex:at:8}, at += 8; opened > 0; opened--)); do
        [[ ${hex:at:24} =~ ^(.{8})(.{8})(.{8})$ ]] || return 1
        index=$((16#${BASH_REMATCH[1]})) bytes=$((16#${BASH_REMATCH[2]}))
        [ $index -lt $pieces ] || return 1
        [ $bytes = $((index < pieces - 1 ? piece : total - index * piece)) ] || return 1
        bytes=$(((bytes + 131071) / 131072)) at=$((at + 24 + 2 * bytes))
        [ $((16#${BASH_REMATCH[3]})) = $bytes ] || return 1
    done
    [ ${#hex} = $at ]
}

# On a full disk aria2 replaces its control files by empty ones, so the last good one is kept.
keep_control_files() {
    local control
    for ((i = 0; i < count; i++)); do
        control=${partial[i]}.aria2
        [[ ${state[i]} = pending && -e $control && ! $control -ef $control.kept ]] || continue
        ln -f "$control" "$control.new" && fits $i "$control.new" &&
            mv -f "$control.new" "$control.kept" || true
    done 2>/dev/null
}

# Replaces a damaged control file of file $1 by the kept one, or removes it.
repair_control_file() {
    local control=${partial[$1]}.aria2
    ! fits "$1" "$control" || return 0
    if [ -e "$control" ] && fits "$1" "$control.kept"; then
        mv -f "$control.kept" "$control"
        return
    fi
    [ ! -e "$control" ] || [ ! -e "${partial[$1]}" ] ||
        say "${names[$1]}: aria2's control file is damaged; what cannot be verified is fetched again"
    rm -f "$control"*
}

# Moves file $1 to the path $2.
move() { [ -d "${2%/*}" ] || mkdir -p "${2%/*}" && mv -fT "$1" "$2"; }

# Files listed in .verified are done. Files that changed since are checked again, and so are
# files in .unfinished without a control file whose SHA-256 is known.
find_verified_files() {
    local line path
    local -A verified=()
    while IFS= read -r line; do verified[$line]=1; done < <(sed '/^$/d' "$dest/.verified")
    for ((i = 0; i < count; i++)); do
        for path in "$dest/${names[i]}" "${partial[i]}" "${partial[i]}.aria2"; do
            [ ! -d "$path" ] || fail "$path is a directory; move it away, a file needs this name"
        done
        if [ -e "$dest/${names[i]}" ]; then
            line=$(identity $i)
            [[ ${verified[$line]-} ]] && state[i]=done sizes[i]=${line%% *} && continue
            rm -f "${partial[i]}.aria2"* && move "$dest/${names[i]}" "${partial[i]}"
            [ -z "${sizes[i]}${sums[i]}" ] || state[i]=downloaded
        else
            repair_control_file $i
            [[ -z ${sums[i]} || ! -e ${partial[i]} || -e ${partial[i]}.aria2 ]] ||
                state[i]=downloaded
        fi
    done
}

# Verifies file $1 and gives it its final name; status 3: wrong size, 4: wrong SHA-256. Runs in the
# background for large files.
check() {
    local size sum
    size=$(stat -c %s "${partial[$1]}") && [ "$size" = "${sizes[$1]:-$size}" ] || return 3
    if [ -n "${sums[$1]}" ]; then
        sum=$(sha256sum <"${partial[$1]}") && [ "${sum%% *}" = "${sums[$1]}" ] || return 4
    fi
    # sync first: after a power cut .verified must not list a file that was lost.
    sync "${partial[$1]}" && move "${partial[$1]}" "$dest/${names[$1]}" && identity "$1" >&9
}

# Handles the result $2 of the check of file $1.
handle_check_result() {
    progressed=1
    case $2 in
        0) state[$1]=done sizes[$1]=$(stat -c %s "$dest/${names[$1]}") && return ;;
        3) reason[$1]="wrong size, $(stat -c %s "${partial[$1]}") instead of ${sizes[$1]} bytes" ;;
        4) reason[$1]="wrong SHA-256, expected ${sums[$1]}" ;;
        *) fail "cannot write ${names[$1]} in $dest" ;;
    esac
    rm "${partial[$1]}"
    state[$1]=pending
    # A downloaded file that fails its check is downloaded once more.
    [ $rounds = 0 ] || failed_checks[$1]=$((failed_checks[$1] + 1))
    [ "${failed_checks[$1]}" -lt 2 ] || give_up "$1"
}

give_up() { # file $1 cannot be downloaded, however often it is tried
    state[$1]=failed
    say "${names[$1]}: ${reason[$1]}; the other files continue"
}

# Leaves the pending files that aria2 can continue in .unfinished.
remove_damaged_files() {
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = pending ] || continue
        repair_control_file $i
        [ -e "${partial[i]}.aria2" ] || rm -f "${partial[i]}"
    done
}

# Starts checks of downloaded files and handles finished checks; sets num_unchecked.
update_states() {
    local path status until=$((SECONDS + 2)) # with many small files, progress is shown in between
    local -A complete=()
    # A file of full length without an .aria2 file is complete, or aria2 was killed before it wrote
    # one. Only aria2's log tells these cases apart.
    while IFS= read -r path; do
        complete[$path]=1
    done < <(sed -n 's/.*Download complete: //p' "$log")
    num_unchecked=0
    for ((i = 0; i < count; i++)); do
        status=0
        if [[ ${state[i]} = pending && ${complete[${partial[i]}]-} ]]; then
            [ ! -e "${partial[i]}" ] || [ -e "${partial[i]}.aria2" ] || state[i]=downloaded
        elif [ "${state[i]}" = checking ] && ! kill -0 "${checker[i]}" 2>/dev/null; then
            wait "${checker[i]}" || status=$?
            handle_check_result $i $status
        fi
        if [ "${state[i]}" != downloaded ]; then
            :
        elif [ "${sizes[i]:-$small}" -lt "$small" ] && [ $SECONDS -lt $until ]; then
            check $i || status=$?
            handle_check_result $i $status
        elif [ $num_unchecked -lt "$max_checkers" ]; then
            check $i &
            checker[i]=$! state[i]=checking
        fi
        case ${state[i]} in downloaded | checking) num_unchecked=$((num_unchecked + 1)) ;; esac
    done
}
finish_checks() {
    update_states
    while [ $num_unchecked -gt 0 ]; do pause 0.1; update_states; done
}

# Sets total, the bytes of all files except failed ones, and on_disk, their bytes on disk. Counts
# allocated blocks, as unfinished files have holes.
count_bytes() {
    local paths=()
    total=0 on_disk=0
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" != failed ] || continue
        total=$((total + ${sizes[i]:-0}))
        [ "${state[i]}" = done ] && on_disk=$((on_disk + sizes[i])) || paths+=("${partial[i]}")
    done
    on_disk=$((on_disk + $({ echo 0; stat -c '%b * %B' "${paths[@]}" || :; } 2>/dev/null |
        paste -sd +)))
}

progress() {
    local rate left='?' line
    count_bytes
    rate=$(((on_disk - at_start) / (SECONDS > 0 ? SECONDS : 1)))
    [ $rate -le 0 ] || [ $on_disk -gt $total ] || left=$(((total - on_disk) / rate / 60))
    line="$(count_of done)/$count files, $(mb $on_disk) of $(mb $total), $((rate / 1000000)) MB/s"
    line+=", $left min left"
    if [ -t 1 ]; then printf '\r%s\033[K' "$prefix $line"; else say "$line"; fi
}

# aria2 sends its headers to redirect targets too, but the CDN must not receive the token. curl
# drops the token there, so it resolves the redirects and aria2 gets the signed links.
resolve_links() {
    local indices=() targets=() links number status target
    for ((i = 0; i < count; i++)); do
        [[ ${state[i]} = pending && ${urls[i]} = "$hub"/* ]] || continue
        indices+=("$i") targets+=("${urls[i]}") link[i]='' reason[i]='no answer from the hub'
    done
    [ ${#indices[@]} -gt 0 ] || return 0
    links=$(mktemp "$unfinished/.links.XXXXXX") # mktemp gives it mode 600
    printf 'Authorization: Bearer %s\n' "$token" | curl -qgsIL -H @- -m 60 --connect-timeout 10 \
        -Z --parallel-immediate --parallel-max 16 "${targets[@]}" \
        -w '\n=> %{urlnum} %{http_code} %{url_effective}\n' >"$links" 2>/dev/null 9>&- &
    child=$!
    wait $child || true # every link has its own status
    child=
    while read -r number status target; do
        i=${indices[number]}
        [[ $status = 200 || $target != "$hub"/* ]] &&
            link[i]=$target reason[i]='cut off' && continue
        [ "$status" = 000 ] || reason[i]="the hub answers $status to this HF_TOKEN"
        trouble=${reason[i]}
        case $status in 401 | 403 | 404) give_up "$i" ;; esac
    done < <(sed -n 's/^=> //p' "$links")
    rm "$links"
}

# One run of aria2 for all pending files. It inherits the lock and ends when this script ends.
fetch() {
    local shown=$SECONDS status=0 url why
    link=("${urls[@]}")
    [ -z "$token" ] || resolve_links
    rounds=$((rounds + 1))
    for ((i = 0; i < count; i++)); do
        [ "${state[i]}" = pending ] && [ -n "${link[i]}" ] || continue
        printf '%s\n  out=%s\n' "${link[i]}" "${names[i]}"
        [[ -z $token || ${link[i]} != "$hub"/* ]] || # the hub sends this file itself
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
        update_states
        keep_control_files
        [ $((SECONDS - shown)) -lt "$progress_every" ] || { progress && shown=$SECONDS; }
    done
    wait $child 2>/dev/null || status=$?
    child=
    [ $status != 28 ] || fail "aria2c: $(head -n 3 "$log" | tr '\n' ' ')"
    finish_checks
    # The exit code covers the last error only; the log has one per file.
    while read -r url status why; do
        for ((i = 0; i < count; i++)); do
            [ "${state[i]}" = pending ] && [ "${link[i]}" = "$url" ] || continue
            [[ $why != 'total length mismatch'* ]] ||
                { rm -f "${partial[i]}"* && why='the size on the server has changed'; }
            reason[i]="$why (aria2 error $status)" trouble=$why
            [ "$status" != 9 ] || fail "no space in $dest; free some, or name another directory"
            [[ $status != 24 || ${urls[i]} != "$hub"/* ]] ||
                reason[i]="the hub answers 401: a gated dataset needs HF_TOKEN"
            [[ $why != *status=403* || $token || ${urls[i]} != "$hub"/* ]] ||
                reason[i]="the hub answers 403: if the dataset is gated, set HF_TOKEN"
            case $status in 3 | 24) give_up $i ;; esac
        done
    done < <(awk '
        / Download aborted. URI=/ { url = $0; sub(/.* URI=/, "", url) }
        /^  -> .* errorCode=[0-9]/ { sub(/.* errorCode=/, ""); print url, $0 }
    ' "$log")
}

# Runs aria2 until no file is pending or MAX_ROUNDS rounds made no progress.
download() {
    local idle=0 delay=$retry_wait free needed before trouble
    while [ "$(count_of pending)" -gt 0 ] && [ $idle -lt "$max_rounds" ]; do
        count_bytes
        free=$(df --output=avail -B1 "$dest" | tail -n 1)
        # Without sizes in the plan, any pending file needs space.
        needed=$((total > on_disk ? total - on_disk : 1000000)) # 1 MB of files of unknown size
        [ $needed -le "$free" ] ||
            fail "no space in $dest: at least $(mb $needed) needed, $(mb "$free") free;" \
                "free some, or name another directory"
        if [ $rounds -gt 0 ]; then
            say "$(count_of pending) files are pending ($trouble); next try in $delay s"
            pause "$delay"
        fi
        before=$on_disk progressed=0 trouble='cut off'
        fetch
        remove_damaged_files
        count_bytes
        idle=$((idle + 1)) delay=$((delay * 2 < max_wait ? delay * 2 : max_wait))
        [ $progressed = 0 ] && [ $on_disk -le "$before" ] || { idle=0 && delay=$retry_wait; }
    done
}

stop() {
    trap '' INT TERM HUP
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null || true
    rm -f "$unfinished"/.links.*
    say "interrupted; the same command resumes"
    exit "$1"
}

case ${1:-} in -h | --help) sed -n '2,/^\[ -n/{/^#/s/^# \{0,1\}//p}' "$0" && exit ;; esac
[ $# -le 2 ] || fail "too many arguments; see bash script.sh --help"
[[ ${1:-} != -* ]] || fail "$1 is unknown, there are no flags; see bash script.sh --help"
files=${FILES:-4} connections=${CONNECTIONS:-8} save_every=${SAVE_EVERY:-2}
retry_wait=${RETRY_WAIT:-5} max_wait=${MAX_WAIT:-300} max_rounds=${MAX_ROUNDS:-8}
progress_every=${PROGRESS_EVERY:-15}
[ ! -t 1 ] || progress_every=1
small=1000000 # bytes; smaller files are checked at once
max_checkers=$(nproc) child='' rounds=0
plan=${1:-$(default_plan)} dest=data is_archives=
[ ! -f "$plan" ] || [ "$(head -n 1 "$plan" 2>/dev/null)" != '# archives' ] || dest=downloads is_archives=1
dest=${2:-$dest}
unfinished=$dest/.unfinished log=$dest/.unfinished/.aria2.log
trap 'stop 130' INT
trap 'stop 143' TERM HUP
k=${plan##*/download-}
[ "$k" = "$plan" ] || prefix="[$host worker ${k%.txt}]"
check_number() { # name, value, smallest and largest value
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ && $2 -ge $3 && $2 -le $4 ]] ||
        fail "$1=$2 is not a whole number from $3 to $4"
}
check_number FILES "$files" 1 1000
check_number CONNECTIONS "$connections" 1 16
check_number SAVE_EVERY "$save_every" 0 600
check_number RETRY_WAIT "$retry_wait" 0 600
check_number MAX_WAIT "$max_wait" 0 86400
check_number MAX_ROUNDS "$max_rounds" 1 1000000
check_number PROGRESS_EVERY "$progress_every" 1 86400
check_number LOCK_WAIT "${LOCK_WAIT:=60}" 0 86400
status=0
[ -n "${HF_ENDPOINT-}" ] || unset HF_ENDPOINT
answer=$(ask_huggingface_hub) || status=$?
case $status in
    0) hub=${answer%%"$nl"*} token=${answer#"$hub"} token=${token#"$nl"} ;;
    1)
        hub=${HF_ENDPOINT:-https://huggingface.co} hub=${hub%/}
        answer=${HF_HOME:-${HOME:-}/.cache/huggingface}/token
        read -r token <<<"${HF_TOKEN:-$(cat "$answer" 2>/dev/null || true)}"
        [ -n "$token" ] || [ -z "${HF_TOKEN_PATH-}${HUGGING_FACE_HUB_TOKEN-}" ] ||
            say "warning: no python3 has huggingface_hub, which reads HF_TOKEN_PATH and" \
                "HUGGING_FACE_HUB_TOKEN; for a gated dataset activate the environment or set HF_TOKEN"
        ;;
    *) exit $status ;;
esac
unset answer HF_TOKEN HUGGING_FACE_HUB_TOKEN
type aria2c ${token:+curl} >/dev/null 2>&1 ||
    fail "aria2c or curl is not installed: sudo apt-get install aria2 curl (or run setup-tpu-vm.sh)"
[ ! -d "$plan" ] || fail "$plan is a directory; name the plan's file, such as plan/download-0.txt"
[ -f "$plan" ] || fail "no such plan: $plan; make one: python script.py --dataset NAME"
read_plan
mkdir -p "$dest" 2>/dev/null || fail "cannot make the directory $dest; name another"
{ exec 9>>"$dest/.verified"; } 2>/dev/null || fail "cannot write in $dest"
flock -n 9 || say "waiting for another script.sh on $dest"
flock -w "$LOCK_WAIT" 9 >/dev/null & wait $! ||
    fail "another script.sh is busy in $dest; wait until it ends"

find_verified_files
if [ "$(count_of done)" -lt "$count" ]; then
    mkdir -p "$unfinished"
    (umask 077 && touch "$log") # contains signed links
    finish_checks
fi
remove_damaged_files
count_bytes
at_start=$on_disk SECONDS=0
download

planned=$nl$(printf '%s\n' "${names[@]-}")$nl extra='' without_sum=0
for ((i = 0; i < count; i++)); do
    [ "${state[i]}" = done ] || { say "missing: ${names[i]}: ${reason[i]}" >&2 && continue; }
    rm -f "${partial[i]}".aria2*
    [ -n "${sums[i]}" ] || without_sum=$((without_sum + 1))
done
[ "$(count_of done)" -eq "$count" ] ||
    { say "$(count_of done) of $count files are complete; run the same command again," \
        "or correct an address or size in the list and run script.py again" >&2; exit 1; }
rm -f "$log" "$unfinished"/.links.*
[ ! -d "$unfinished" ] || find "$unfinished" -depth -type d -empty -delete
[ ! -d "$unfinished" ] ||
    say "$unfinished has files of another plan; the loader refuses $dest until you finish that" \
        "plan or remove the directory"
for file in "$dest"/*.parquet; do
    [[ $is_archives || $planned = *"$nl${file##*/}$nl"* ]] || extra+=" ${file##*/}"
done
[ -z "$extra" ] || say "$plan does not list all files of $dest, but the loader takes every" \
    "*.parquet there; move away those that you do not want to train on:$extra"
count_bytes
seconds=$((SECONDS > 0 ? SECONDS : 1)) verified='all verified'
[ $without_sum = 0 ] || verified="$without_sum of them without a checksum"
say "complete: $count files, $(mb $on_disk), $verified; fetched $(mb $((on_disk - at_start)))" \
    "in $SECONDS s, $(((on_disk - at_start) / seconds / 1000000)) MB/s"
