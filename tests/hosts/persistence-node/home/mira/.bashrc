case $- in *i*) ;; *) return;; esac
[ -f ~/.bash_aliases ] && . ~/.bash_aliases
. "$HOME/.cargo/env"
