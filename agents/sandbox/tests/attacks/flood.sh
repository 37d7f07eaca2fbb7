# More than anybody wants to read.
exec yes "a line that says nothing"
