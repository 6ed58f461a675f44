// Which clients the server accepts, and how it answers each request.
//
//     greeting --hello--> proving --right proof--> validating --VALIDATE--> open: any request
//        |                   `--wrong proof--> refused
//        |--hello, but this server has no token, if the client may be served--> validating
//        |--VALIDATE of a client without a token, if it may be served--> validating
//        `--anything else--> refused
//
// src/unisono/core/stores/tcp/token.py has the messages of the handshake.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <optional>

#include <sys/socket.h>

#include "store/connection.hpp"

namespace unisono::store {

namespace {

constexpr std::size_t kShownBytes = 64;

const std::string_view kMagicBytes{reinterpret_cast<const char*>(&kMagic), sizeof kMagic};
// The twin of REFUSED_KEY in src/unisono/core/stores/tcp/token.py.
constexpr std::string_view kRefusedKey = "refused";
// That of REFUSAL_KEY.
constexpr std::string_view kRefusalKey = "refusal";

const std::string kOrEverybody = "; or UNISONO_INSECURE=1 here accepts any client";
const std::string kGiveToken = "give it the job's token, UNISONO_TOKEN" + kOrEverybody;
const std::string kMakeToken = "set UNISONO_TOKEN to the same secret here and there" + kOrEverybody;

const std::string kEncrypt = "it does not encrypt; give it the UNISONO_TLS of this server";

std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// Whether the first TLS record asks for the secret of stores, as a port scan does not.
bool names_store(int fd) {
  constexpr std::string_view kIdentity{"\0\5store", 7};
  std::array<char, 2048> record;
  const ssize_t count = recv(fd, record.data(), record.size(), MSG_PEEK | MSG_DONTWAIT);
  const std::string_view hello{record.data(),
                               static_cast<std::size_t>(std::max<ssize_t>(count, 0))};
  return hello.find(kIdentity) != std::string_view::npos;
}

}  // namespace

std::string quoted(std::string_view text) {
  std::string shown = "'";
  for (char c : text.substr(0, kShownBytes)) {
    if (c >= ' ' && c <= '~') {
      shown.push_back(c);
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
      shown.append(escaped);
    }
  }
  return shown.append(text.size() > kShownBytes ? "...'" : "'");
}

// Find out by the first byte whether a client speaks TLS. False: it is not there, or the client is
// refused.
bool Server::sniff(Connection& client) {
  constexpr char kHandshake = 22;  // the type of the first TLS record
  char first = 0;
  const ssize_t count = recv(client.fd, &first, 1, MSG_PEEK);
  if (count <= 0) {
    client.has_input = count < 0 && errno == EINTR;
    if (count == 0 || (errno != EINTR && errno != EAGAIN)) doom(client);
    return false;
  }
  client.is_sniffed = true;
  if (first != kHandshake) return true;
  if (options_.tls == Tls::none) {
    const bool has_token = !options_.token.empty();
    if (!has_token && !client.peer.is_local(client.fd) && names_store(client.fd)) {
      note_refused(client);
    }
    refuse(client, has_token ? kNoTlsHere : kNoTokenHere,
           has_token ? "it encrypts, and this server does not (UNISONO_TLS)"
                     : "it has a token, and there is none here");
    return false;
  }
  client.tls =
    std::make_unique<TlsSession>(options_.context, client.fd, true, options_.secrets, "");
  return true;
}

// Whether the server speaks with this client by TLS only.
bool Server::lacks_tls(const Connection& client) const {
  return client.tls == nullptr && (options_.tls == Tls::all || (options_.tls == Tls::other_hosts &&
                                                                !client.peer.is_local(client.fd)));
}

// Handle a client's first bytes; return how many of them were its greeting.
std::size_t Server::greet(Connection& client, std::string_view data) {
  if (client.phase == Connection::Phase::proving) {
    if (data.size() < sizeof(Digest)) return 0;
    const Digest expected =
      proof(options_.token, "client", {client.client_nonce->data(), kNonceBytes},
            {client.server_nonce->data(), kNonceBytes});
    client.client_nonce.reset();
    client.server_nonce.reset();
    if (is_same(expected, data.substr(0, expected.size()))) {
      client.out.append_number(static_cast<char>(kWelcome));
      client.phase = Connection::Phase::validating;
    } else {
      refuse(client, kWrongToken, "it has another token");
    }
    return expected.size();
  }
  if (data[0] == static_cast<char>(Opcode::validate)) {
    if (lacks_tls(client) && (options_.tls == Tls::all || options_.context->has_certificate)) {
      refuse(client, kTlsNeeded, kEncrypt);
    } else if (options_.serves_strangers ||
               (client.tls != nullptr && options_.context->has_certificate)) {
      client.phase = Connection::Phase::validating;
    } else if (client.peer.is_local(client.fd)) {
      // Processes of this user can read the token anyway.
      if (!options_.token.empty() && client.peer.is_foreign(client.fd)) {
        refuse(client, kTokenNeeded, "it is another user's and has no token; " + kGiveToken);
      } else {
        client.phase = Connection::Phase::validating;
      }
    } else if (options_.token.empty()) {
      // Not for a port scan, so the magic number must be there.
      if (data.substr(1, sizeof kMagic) == kMagicBytes) note_refused(client);
      refuse(client, kLocalOnly, "it is on another machine, and there is no token; " + kMakeToken);
    } else {
      refuse(client, kTokenNeeded, "it is on another machine and has no token; " + kGiveToken);
    }
    return 0;
  }
  const std::size_t known = std::min(data.size(), kHello.size());
  if (data.substr(0, known) != kHello.substr(0, known)) {
    doom(client, "it is no client of a store");
  } else if (lacks_tls(client)) {
    refuse(client, kTlsNeeded, kEncrypt);
  } else if (data.size() >= kHelloBytes) {
    admit(client, data.substr(kHello.size(), kNonceBytes));
    return kHelloBytes;
  }
  return 0;
}

// Answer a hello with a challenge, and with the proof that this server knows the token.
void Server::admit(Connection& client, std::string_view client_nonce) {
  if (options_.token.empty()) {
    if (!options_.serves_strangers && !client.peer.is_local(client.fd)) {
      note_refused(client);
      refuse(client, kNoTokenHere, "it has a token, and there is none here");
      return;
    }
    // A client on this machine continues without a token.
    client.out.append_number(static_cast<char>(kNoTokenHere));
    client.phase = Connection::Phase::validating;
    return;
  }
  client.client_nonce = std::make_unique<Connection::Nonce>();
  client.server_nonce = std::make_unique<Connection::Nonce>();
  client_nonce.copy(client.client_nonce->data(), kNonceBytes);
  if (!fresh_nonce(*client.server_nonce)) {
    doom(client, "the system has no random numbers");
    return;
  }
  const std::string_view nonce(client.server_nonce->data(), kNonceBytes);
  client.out.append_number(static_cast<char>(kChallenge));
  client.out.append(nonce);
  client.out.append(text_of(proof(options_.token, "server", client_nonce, nonce)));
  client.phase = Connection::Phase::proving;
}

// Leave the address of the first client that lacks a token to ranks that wait for others.
void Server::note_refused(const Connection& client) {
  table_.compare_set(kRefusedKey, {}, client.peer.text());
}

// Leave the first client that speaks the protocol and is refused, and the reason, to error texts.
void Server::note_refusal(const Connection& client, const std::string& why) {
  table_.compare_set(kRefusalKey, {}, client.peer.text() + ": " + why);
}

void Server::refuse(Connection& client, Answer answer, const std::string& why) {
  note_refusal(client, why);
  client.out.append_number(static_cast<char>(answer));
  // Not flush(), because a client that has gone must be logged with this reason.
  const ssize_t sent = send(client.fd, client.out.data(), client.out.size(), MSG_NOSIGNAL);
  static_cast<void>(sent);
  doom(client, why);
}

void Server::handle(Connection& client) {
  const Request& request = request_;
  if (client.phase == Connection::Phase::validating) {
    if (request.op != Opcode::validate || request.word != kMagic) {
      doom(client, "it does not begin with VALIDATE and the magic number");
      return;
    }
    client.phase = Connection::Phase::open;
    return;
  }
  // Kept until the end of the request, which may take the promised value.
  const std::optional<std::string> promised = table_.take_promise(client);
  switch (request.op) {
    case Opcode::validate: break;
    case Opcode::set: table_.set(request.key, request.value); break;
    case Opcode::queue_push: table_.queue_push(request.key, request.value); break;
    case Opcode::multi_set:
      for (std::size_t i = 0; i < request.keys.size(); ++i) {
        table_.set(request.keys[i], request.values[i]);
      }
      break;
    case Opcode::compare_set:
      client.out.append_sized(table_.compare_set(request.key, request.value, request.other));
      break;
    case Opcode::get: {
      const std::string* value = table_.find(request.key);
      client.out.append_sized(value == nullptr ? std::string_view() : *value);
      break;
    }
    case Opcode::check:
      client.out.append_number(table_.has_all(request.keys) ? kReady : kNotReady);
      break;
    case Opcode::num_keys:
      // Strangers cause the note of a refusal, which is no key of the job.
      client.out.append_number(static_cast<int64_t>(
        table_.values().size() - table_.values().count(std::string(kRefusalKey))));
      break;
    case Opcode::delete_key:
      client.out.append_number(int64_t{table_.delete_key(request.key)});
      break;
    case Opcode::queue_len: client.out.append_number(table_.queue_len(request.key)); break;
    case Opcode::ping: client.out.append_number(request.word); break;
    default: answer_more(client); break;
  }
  if (promised) table_.end_promise(*promised);
}

// Answer the requests that may wait, may fail, or have a long reply.
void Server::answer_more(Connection& client) {
  const Request& request = request_;
  switch (request.op) {
    case Opcode::add: {
      int64_t total;
      if (table_.add(request.key, request.number, &total)) {
        client.out.append_number(total);
      } else {
        // The protocol has no error reply. torch's server closes the connection as well.
        doom(client, "add(" + quoted(request.key) + ", " + std::to_string(request.number) +
                       "): what is stored is not an integer, or the sum leaves 64 bits");
      }
      break;
    }
    case Opcode::append:
      if (!table_.append(request.key, request.value)) {
        doom(client, "append(" + quoted(request.key) + "): the value becomes too long");
      }
      break;
    case Opcode::wait:
      if (table_.wait(client, request.keys)) client.out.append_number(kStopWaiting);
      break;
    case Opcode::barrier:
      if (!table_.arrive(client, request.key, request.number)) {
        doom(client, "barrier " + quoted(request.key) + ": others came with another world size");
      }
      break;
    case Opcode::cancel_wait:
      table_.forget(client);
      client.out.append_number(kWaitCanceled);
      break;
    case Opcode::queue_pop: {
      client.out.append_number(table_.queue_len(request.key));
      std::string value;
      if (table_.queue_pop(request.key, &value)) client.out.append_sized(value);
      break;
    }
    case Opcode::multi_get: answer_multi_get(client); break;
    default:
      client.out.append_number(static_cast<uint64_t>(table_.values().size()));
      for (const auto& item : table_.values()) client.out.append_sized(item.first);
      break;
  }
}

void Server::answer_multi_get(Connection& client) {
  uint64_t nbytes = 0;
  std::vector<std::string_view> values;
  values.reserve(request_.keys.size());
  for (std::string_view key : request_.keys) {
    const std::string* value = table_.find(key);
    values.push_back(value == nullptr ? std::string_view() : *value);
    nbytes += values.back().size();
  }
  if (nbytes > options_.max_reply_bytes) {
    doom(client, "multi_get of " + std::to_string(values.size()) + " keys has " +
                   std::to_string(nbytes) + " bytes; too many for one reply");
    return;
  }
  for (std::string_view value : values) client.out.append_sized(value);
}

}  // namespace unisono::store
