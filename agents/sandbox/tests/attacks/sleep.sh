# Waits for ever and does not listen.
trap '' TERM INT HUP QUIT
while :; do sleep 1000; done
