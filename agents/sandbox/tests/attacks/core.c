// Falls over, with much to dump.
#include <stdlib.h>
int main(void) { abort(); }
