#!/bin/sh
# Runs on a worker: one command at a time, apart from any connection, with its log and its exit status in files.
#
#   job.sh which                         which bundle is set up, with which packages
#   job.sh start NAME COMMAND [ARG...]   starts it, unless NAME was started before
#   job.sh poll NAME OFFSET              how NAME is, and what its log has from that byte on
#   job.sh signal NAME TERM|KILL         to all of its processes
#
# The first line that counts begins with "grpojax: "; a connection that broke gives none.
set -u
root=$HOME/grpojax
jobs=$root/jobs
most=65536 # bytes of a log at a time
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo none)

alive() { # NAME: whether its processes are there, in this life of the machine
    [ -e "$jobs/$1/exit" ] && return 1
    [ -e "$jobs/$1/pid" ] || return 1
    read -r pid life <"$jobs/$1/pid"
    [ "$life" = "$boot" ] && kill -0 "-$pid" 2>/dev/null
}

start() { # NAME COMMAND...
    name=$1
    shift
    if [ -e "$jobs/$name" ]; then
        echo "grpojax: started"
        return
    fi
    for other in "$jobs"/*; do
        if alive "${other##*/}"; then
            echo "grpojax: busy ${other##*/}"
            return
        fi
    done
    mkdir -p "$jobs" && mkdir "$jobs/$name" || exit
    # The shell below outlives a signal to the group, so as to write how the command ended.
    # shellcheck disable=SC2016
    setsid nohup sh -c '
        job=$1 root=$2 boot=$3
        shift 3
        trap : TERM INT HUP
        echo "$$ $boot" >"$job/pid.new" && mv "$job/pid.new" "$job/pid"
        [ ! -e "$root/current/variables" ] || . "$root/current/variables"
        PATH=$root/venv/bin:$root/bin:$PATH
        export PATH
        case ${job##*/} in
        setup-*) ;; # its paths are from the home folder
        *) cd "$root/current/tree" || exit ;;
        esac
        "$@"
        code=$?
        echo "$code" >"$job/exit.new" && mv "$job/exit.new" "$job/exit"
    ' sh "$jobs/$name" "$root" "$boot" "$@" >"$jobs/$name/log" 2>&1 </dev/null &
    tries=0
    until [ -e "$jobs/$name/pid" ] || [ "$tries" -ge 100 ]; do
        tries=$((tries + 1))
        sleep 0.05
    done
    [ -e "$jobs/$name/pid" ] || echo 127 >"$jobs/$name/exit"
    echo "grpojax: started"
}

poll() { # NAME OFFSET
    if [ ! -e "$jobs/$1" ]; then
        echo "grpojax: absent"
        return
    fi
    # Whether it lives is asked before the status: it may end in between.
    state=died
    if alive "$1"; then state=running; fi
    if [ -e "$jobs/$1/exit" ]; then
        read -r code <"$jobs/$1/exit"
        state="exited $code"
    elif [ ! -e "$jobs/$1/pid" ]; then
        state=running
    fi
    echo "grpojax: $state"
    tail -c "+$(($2 + 1))" "$jobs/$1/log" 2>/dev/null | head -c "$most"
}

signal() { # NAME SIGNAL
    if alive "$1"; then
        read -r pid life <"$jobs/$1/pid"
        kill "-$2" "-$pid"
    fi
    echo "grpojax: signalled"
}

which() {
    bundle=$(readlink "$root/current" 2>/dev/null)
    if [ -z "$bundle" ]; then
        echo "grpojax: unprepared"
    else
        echo "grpojax: prepared ${bundle##*/} $(cat "$root/current/packages" 2>/dev/null)"
    fi
}

action=$1
shift
"$action" "$@"
