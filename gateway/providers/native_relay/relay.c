// Passes the texts of running streams from deployments to clients, without Python.
//
// The sockets belong to Python's event loop. While a stream is here, the loop does not read the deployment's socket and
// writes nothing to the client's. A thread of the relay waits for the deployments' sockets and passes on what arrives.
// It never takes the interpreter's lock, so it neither waits for Python nor wakes it.
//
// Only chunks of HTTP's transfer coding that each contain one event of the stream's learned form are passed on, by the
// rules of `DirectText.take` in text_events.py. For anything else, the thread lets go of the stream and hands it over
// to Python, with the bytes that were read.
//
// relay.py is the only caller, from the thread of its event loop. One mutex protects all streams. The thread holds it
// while it serves one stream, which never blocks, so Python waits at most for one read and one write.

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 128 };                 // events of one `epoll_wait`
enum { READ_BYTES = 64 * 1024 };      // a read that fills the buffer is handed over, since more may be waiting
enum { KEPT_MAX_BYTES = 16 * 1024 };  // of events that Python wants to have; then it takes the stream and gets them
enum { SIZE_DIGITS_MAX = 5 };         // of a chunk's size, in hexadecimal: no larger one fits into the buffer
enum { STACK_BYTES = 128 * 1024 };    // of the thread

// What Python reads of a stream: `since` at any time, everything else after `warmpath_relay_stop`.
struct Passed {
  double since;           // seconds of CLOCK_MONOTONIC at the last chunk that was passed on; 0: none
  int64_t events, bytes;  // passed on since the stream was adopted; bytes without the transfer coding
  int64_t kept_bytes;     // of events in `kept`
  int64_t sample_bytes;   // of them, those that belong to the sample of the text, which come first
  uint8_t* kept;
  int64_t rest_bytes;       // of `rest`; -1: bytes were lost, because memory was short
  int64_t rest_is_counted;  // the client has what comes before `rest` of the same events, which are counted
  uint8_t* rest;            // bytes that were read and not passed on
};

struct Stream {
  struct Passed passed;
  int64_t id;
  int is_active;           // the thread serves it; if not, it is handed over, stopped or unused
  int deployment, client;  // file descriptors
  int keeps_all;           // whether Python wants all events, or only those of the sample
  int64_t bytes_before;    // received before the stream was adopted
  int64_t sample_max;      // events belong to the sample while fewer bytes were received before them
  double until;            // a chunk that reaches so many received bytes is handed over
  int64_t kept_room;
  int64_t before_bytes, after_bytes;
  uint8_t* form;        // what events have before their text, then what they have after it
  struct Stream* next;  // in the list of streams that are handed over, or of those that are unused
};

struct Relay {
  pthread_mutex_t mutex;
  pthread_t thread;
  int epoll;
  int stop;                    // an eventfd that ends the thread
  int news;                    // an eventfd that is readable while streams are handed over
  struct Stream* handed_over;  // oldest first
  // Streams are used again and never freed before the relay: an event of the thread may come late. At worst, a stream
  // that uses the same memory is then read without need, or handed over without bytes.
  struct Stream* unused;
  uint8_t buffer[READ_BYTES];
};

#define EXPORTED __attribute__((visibility("default")))

// Whether these bytes are the inside of a JSON string in UTF-8, without unusual escapes.
static int is_plain(const uint8_t* at, const uint8_t* end) {
  while (at < end) {
    const uint8_t byte = *at++;
    if (byte < 0x20 || byte == '"' || byte == 0x7f) return 0;
    if (byte == '\\') {
      if (at == end || *at == 0 || strchr("\"\\/bfnrt", *at) == NULL) return 0;
      at++;
    } else if (byte >= 0x80) {  // RFC 3629, 4: no surrogates, no longer forms than needed, at most U+10FFFF
      const int more = byte < 0xc2 ? 0 : byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : byte < 0xf5 ? 3 : 0;
      if (more == 0 || end - at < more) return 0;
      const uint8_t low = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
      const uint8_t high = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
      if (*at < low || *at > high) return 0;
      for (int i = 1; i < more; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
      at += more;
    }
  }
  return 1;
}

// The bytes in the chunk that begins here, which `at` is moved to. -1: its size is not written as usual.
static int64_t chunk_size(const uint8_t** at, const uint8_t* end) {
  int64_t size = 0;
  const uint8_t* digit = *at;
  for (; digit < end && *digit != '\r'; digit++) {
    const int value = *digit >= '0' && *digit <= '9'   ? *digit - '0'
                      : *digit >= 'a' && *digit <= 'f' ? *digit - 'a' + 10
                                                       : -1;
    if (value < 0 || size + value == 0 || digit - *at == SIZE_DIGITS_MAX) return -1;
    size = size * 16 + value;
  }
  if (digit == *at || end - digit < 2 || digit[1] != '\n') return -1;
  *at = digit + 2;
  return size;
}

// The number of events if these bytes are whole chunks with one event of the learned form each. 0: they are not.
// `payload` is set to the bytes of the events.
static int64_t count_events(const struct Stream* stream, const uint8_t* at, const uint8_t* end, int64_t* payload) {
  int64_t events = 0;
  *payload = 0;
  for (; at < end; events++) {
    const int64_t size = chunk_size(&at, end);
    if (size < stream->before_bytes + stream->after_bytes || end - at < size + 2) return 0;
    const uint8_t* after = at + size - stream->after_bytes;
    if (memcmp(at, stream->form, stream->before_bytes) != 0 ||
        memcmp(after, stream->form + stream->before_bytes, stream->after_bytes) != 0 ||
        !is_plain(at + stream->before_bytes, after) || memcmp(at + size, "\r\n", 2) != 0)
      return 0;
    at += size + 2;
    *payload += size;
  }
  return events;
}

// Makes room for so many more bytes of events. Returns 0 if there would be too many, or no memory.
static int make_room(struct Stream* stream, int64_t bytes) {
  const int64_t needed = stream->passed.kept_bytes + bytes;
  if (needed <= stream->kept_room) return 1;
  if (needed > KEPT_MAX_BYTES) return 0;
  const int64_t room = needed > KEPT_MAX_BYTES / 2 ? KEPT_MAX_BYTES : 2 * needed;
  uint8_t* kept = realloc(stream->passed.kept, room);
  if (kept == NULL) return 0;
  stream->passed.kept = kept;
  stream->kept_room = room;
  return 1;
}

// Keeps the events in these chunks, for which there is room.
static void keep_events(struct Passed* passed, const uint8_t* at, const uint8_t* end) {
  while (at < end) {
    const int64_t size = chunk_size(&at, end);
    memcpy(passed->kept + passed->kept_bytes, at, size);
    passed->kept_bytes += size;
    at += size + 2;
  }
}

// Passes on what was read, if it has the learned form and the client's socket takes it. Returns the bytes that the
// socket has taken. If they are not all, the others are to be written next. 0: nothing was done.
static int64_t pass(struct Stream* stream, const uint8_t* data, int64_t bytes) {
  struct Passed* passed = &stream->passed;
  int64_t payload;
  const int64_t events = count_events(stream, data, data + bytes, &payload);
  const int64_t before = stream->bytes_before + passed->bytes;
  if (events == 0 || (double)(before + payload) >= stream->until) return 0;
  const int is_sample = before < stream->sample_max;
  const int keeps = is_sample || stream->keeps_all;
  if (keeps && !make_room(stream, payload)) return 0;
  int64_t written;
  do {
    written = send(stream->client, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (written < 0 && errno == EINTR);
  if (written <= 0) return 0;
  if (keeps) keep_events(passed, data, data + bytes);
  if (is_sample) passed->sample_bytes = passed->kept_bytes;
  passed->events += events;
  passed->bytes += payload;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double since = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
  __atomic_store(&passed->since, &since, __ATOMIC_RELAXED);
  return written;
}

// Lets go of a stream, and tells Python. The bytes are those that were read and not passed on.
static void hand_over(struct Relay* relay, struct Stream* stream, const uint8_t* rest, int64_t rest_bytes) {
  if (rest_bytes > 0) {
    stream->passed.rest = malloc(rest_bytes);
    if (stream->passed.rest != NULL) memcpy(stream->passed.rest, rest, rest_bytes);
    stream->passed.rest_bytes = stream->passed.rest != NULL ? rest_bytes : -1;
  }
  epoll_ctl(relay->epoll, EPOLL_CTL_DEL, stream->deployment, NULL);
  stream->is_active = 0;
  struct Stream** last = &relay->handed_over;
  while (*last != NULL) last = &(*last)->next;
  *last = stream;
  stream->next = NULL;
  if (relay->handed_over == stream) eventfd_write(relay->news, 1);
}

// Reads a deployment's socket. It is edge-triggered: a read that does not fill the buffer has emptied the socket.
static void serve(struct Relay* relay, struct Stream* stream, uint32_t events) {
  if (events != EPOLLIN) {  // the connection has ended, and Python shall see how
    hand_over(relay, stream, NULL, 0);
    return;
  }
  int64_t bytes;
  do {
    bytes = recv(stream->deployment, relay->buffer, READ_BYTES, MSG_DONTWAIT);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (bytes < 0) bytes = 0;  // Python sees the error as the end of the connection
  const int64_t written = 0 < bytes && bytes < READ_BYTES ? pass(stream, relay->buffer, bytes) : 0;
  if (written == bytes && bytes > 0) return;
  stream->passed.rest_is_counted = written > 0;
  hand_over(relay, stream, relay->buffer + written, bytes - written);
}

static void* run(void* argument) {
  struct Relay* relay = argument;
  struct epoll_event ready[BATCH];
  pthread_setname_np(pthread_self(), "relay");
  for (;;) {
    const int count = epoll_wait(relay->epoll, ready, BATCH, -1);
    for (int i = 0; i < count; i++) {
      struct Stream* stream = ready[i].data.ptr;
      if (stream == NULL) return NULL;  // `stop`
      pthread_mutex_lock(&relay->mutex);
      if (stream->is_active) serve(relay, stream, ready[i].events);
      pthread_mutex_unlock(&relay->mutex);
    }
  }
}

// Starts the thread. It handles no signals, which are Python's.
static int start(struct Relay* relay) {
  pthread_attr_t attributes;
  sigset_t all, before;
  sigfillset(&all);
  if (pthread_attr_init(&attributes) != 0) return 0;
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&relay->thread, &attributes, run, relay);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return error == 0;
}

// A new relay, or NULL.
EXPORTED struct Relay* warmpath_relay_open(void) {
  struct Relay* relay = calloc(1, sizeof *relay);
  if (relay == NULL) return NULL;
  pthread_mutex_init(&relay->mutex, NULL);
  relay->epoll = epoll_create1(EPOLL_CLOEXEC);
  relay->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  relay->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
  if (relay->epoll >= 0 && relay->stop >= 0 && relay->news >= 0 &&
      epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->stop, &event) == 0 && start(relay))
    return relay;
  if (relay->epoll >= 0) close(relay->epoll);
  if (relay->stop >= 0) close(relay->stop);
  if (relay->news >= 0) close(relay->news);
  free(relay);
  return NULL;
}

// The file descriptor that is readable while `warmpath_relay_next` has a stream.
EXPORTED int warmpath_relay_news(const struct Relay* relay) { return relay->news; }

// The id of a stream that was handed over, oldest first. 0: there is none.
EXPORTED int64_t warmpath_relay_next(struct Relay* relay) {
  pthread_mutex_lock(&relay->mutex);
  struct Stream* stream = relay->handed_over;
  if (stream != NULL) {
    relay->handed_over = stream->next;
  } else {
    eventfd_t count;
    eventfd_read(relay->news, &count);
  }
  pthread_mutex_unlock(&relay->mutex);
  return stream == NULL ? 0 : stream->id;
}

// Ends the thread and frees everything. All streams must have been released.
EXPORTED void warmpath_relay_close(struct Relay* relay) {
  eventfd_write(relay->stop, 1);
  pthread_join(relay->thread, NULL);
  for (struct Stream *stream = relay->unused, *next; stream != NULL; stream = next) {
    next = stream->next;
    free(stream);
  }
  close(relay->epoll);
  close(relay->stop);
  close(relay->news);
  pthread_mutex_destroy(&relay->mutex);
  free(relay);
}

static void free_buffers(struct Stream* stream) {
  free(stream->passed.kept);
  free(stream->passed.rest);
  free(stream->form);
}

// Passes on a stream from now on. Returns NULL if the system cannot. See `struct Stream` for the arguments.
EXPORTED struct Stream* warmpath_relay_adopt(struct Relay* relay, int64_t id, int deployment, int client,
                                             const uint8_t* before, int64_t before_bytes, const uint8_t* after,
                                             int64_t after_bytes, int keeps_all, int64_t bytes_before,
                                             int64_t sample_max, double until) {
  uint8_t* form = malloc(before_bytes + after_bytes);
  if (form == NULL) return NULL;
  memcpy(form, before, before_bytes);
  memcpy(form + before_bytes, after, after_bytes);
  pthread_mutex_lock(&relay->mutex);
  struct Stream* stream = relay->unused;
  if (stream != NULL) relay->unused = stream->next;
  else stream = malloc(sizeof *stream);
  if (stream != NULL) {
    *stream = (struct Stream){.id = id,
                              .is_active = 1,
                              .deployment = deployment,
                              .client = client,
                              .keeps_all = keeps_all,
                              .bytes_before = bytes_before,
                              .sample_max = sample_max,
                              .until = until,
                              .before_bytes = before_bytes,
                              .after_bytes = after_bytes,
                              .form = form};
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.ptr = stream};
    if (epoll_ctl(relay->epoll, EPOLL_CTL_ADD, deployment, &event) != 0) {
      stream->is_active = 0;
      stream->next = relay->unused;
      relay->unused = stream;
      stream = NULL;
    }
  }
  pthread_mutex_unlock(&relay->mutex);
  if (stream == NULL) free(form);
  return stream;
}

// Ends the relaying of a stream, whose sockets must still be open. From now on, only Python uses it.
EXPORTED void warmpath_relay_stop(struct Relay* relay, struct Stream* stream) {
  pthread_mutex_lock(&relay->mutex);
  if (stream->is_active) {
    epoll_ctl(relay->epoll, EPOLL_CTL_DEL, stream->deployment, NULL);
    stream->is_active = 0;
  }
  for (struct Stream** at = &relay->handed_over; *at != NULL; at = &(*at)->next) {
    if (*at == stream) {
      *at = stream->next;
      break;
    }
  }
  pthread_mutex_unlock(&relay->mutex);
}

// Frees what a stopped stream has.
EXPORTED void warmpath_relay_release(struct Relay* relay, struct Stream* stream) {
  free_buffers(stream);
  pthread_mutex_lock(&relay->mutex);
  stream->next = relay->unused;
  relay->unused = stream;
  pthread_mutex_unlock(&relay->mutex);
}
