/*
 * Starts argv[1] processes that wait, prints their pids, and waits for the end of its input.
 * They end with it. Each has argv[2] descriptors more than the usual three.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 0;
    int descriptors = argc > 2 ? atoi(argv[2]) : 0;
    pid_t parent = getpid();
    for (int i = 0; i < descriptors; i++)
        if (open("/dev/null", O_RDONLY) < 0)
            return 1;
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(0);
            for (;;)
                pause();
        }
        printf("%d\n", (int)pid);
    }
    printf("ready\n");
    fflush(stdout);
    return getchar() == EOF ? 0 : 0;
}
