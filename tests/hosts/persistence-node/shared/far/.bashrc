nohup /tmp/unreachable &
