// A plain TCP stream over loopback between two processes: what the tcp lane is measured against. No checks, no framing.
//
// usage: loopback_stream CONNECTIONS TOTAL_BYTES WINDOW_BYTES
// The sender walks through a window of WINDOW_BYTES again and again, and so does the receiver: with WINDOW_BYTES equal
// to TOTAL_BYTES the bytes come from and go to memory as a pool's do; with a small window both ends stay in the cache.
// Reads a line from standard input for every round and answers with the round's seconds; ends at end of input.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kMaxConnections = 256, kCallBytes = 1 << 20 };

struct End {
  int fd;
  char* window;
  uint64_t window_bytes;
  uint64_t total_bytes;
  int failed;
};

static void die(const char* what) {
  fprintf(stderr, "loopback_stream: %s: %s\n", what, strerror(errno));
  exit(1);
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void* pump(struct End* end, int sending) {
  uint64_t done = 0;
  while (done < end->total_bytes) {
    const uint64_t offset = done % end->window_bytes;
    uint64_t want = end->window_bytes - offset;
    if (want > kCallBytes) want = kCallBytes;
    if (want > end->total_bytes - done) want = end->total_bytes - done;
    const ssize_t n = sending ? send(end->fd, end->window + offset, want, MSG_NOSIGNAL)
                              : recv(end->fd, end->window + offset, want, 0);
    if (n <= 0) {
      if (n < 0 && errno == EINTR) continue;
      end->failed = 1;
      return NULL;
    }
    done += (uint64_t)n;
  }
  return NULL;
}

static void* send_all(void* end) { return pump(end, 1); }
static void* receive_all(void* end) { return pump(end, 0); }

static char* make_window(uint64_t bytes) {
  char* window = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (window == MAP_FAILED) die("mmap");
  memset(window, 0x5A, bytes);
  return window;
}

static void run_threads(struct End* ends, int n, void* (*body)(void*)) {
  pthread_t threads[kMaxConnections];
  for (int i = 0; i < n; ++i) {
    if (pthread_create(&threads[i], NULL, body, &ends[i]) != 0) die("pthread_create");
  }
  for (int i = 0; i < n; ++i) {
    pthread_join(threads[i], NULL);
    if (ends[i].failed) die("stream");
  }
}

static void split(struct End* ends, int n, char* window, uint64_t window_bytes, uint64_t total_bytes) {
  const uint64_t share = window_bytes / (uint64_t)n;
  for (int i = 0; i < n; ++i) {
    ends[i].window = window + (uint64_t)i * share;
    ends[i].window_bytes = share;
    ends[i].total_bytes = total_bytes / (uint64_t)n + ((uint64_t)i < total_bytes % (uint64_t)n ? 1 : 0);
  }
}

static int connect_to(const struct sockaddr_in* address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const int one = 1;
  if (fd < 0 || connect(fd, (const struct sockaddr*)address, sizeof *address) != 0) die("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

static void sender(struct End* ends, int n, int start) {
  char go;
  while (read(start, &go, 1) == 1) run_threads(ends, n, send_all);
  _exit(0);
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: loopback_stream CONNECTIONS TOTAL_BYTES WINDOW_BYTES\n");
    return 2;
  }
  const int n = atoi(argv[1]);
  const uint64_t total_bytes = strtoull(argv[2], NULL, 10);
  const uint64_t window_bytes = strtoull(argv[3], NULL, 10);
  if (n < 1 || n > kMaxConnections || total_bytes < (uint64_t)n || window_bytes < (uint64_t)n) {
    fprintf(stderr, "loopback_stream: 1 to %d connections, and at least one byte for each\n", kMaxConnections);
    return 2;
  }

  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (listener < 0 || bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, n) != 0 ||
      getsockname(listener, (struct sockaddr*)&address, &length) != 0) {
    die("listen");
  }
  int start[2];
  if (pipe(start) != 0) die("pipe");

  struct End ends[kMaxConnections];
  memset(ends, 0, sizeof ends);
  const pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(start[1]);
    split(ends, n, make_window(window_bytes), window_bytes, total_bytes);
    for (int i = 0; i < n; ++i) ends[i].fd = connect_to(&address);
    sender(ends, n, start[0]);
  }
  close(start[0]);
  split(ends, n, make_window(window_bytes), window_bytes, total_bytes);
  for (int i = 0; i < n; ++i) {
    ends[i].fd = accept(listener, NULL, NULL);
    if (ends[i].fd < 0) die("accept");
  }

  char line[64];
  while (fgets(line, sizeof line, stdin) != NULL) {
    const double began = now_s();
    if (write(start[1], "g", 1) != 1) die("start");
    run_threads(ends, n, receive_all);
    printf("%.9f\n", now_s() - began);
    fflush(stdout);
  }
  close(start[1]);
  waitpid(child, NULL, 0);
  return 0;
}
