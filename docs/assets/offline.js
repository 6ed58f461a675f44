// Browsers refuse workers to pages that are opened as files. There, the search runs in a hidden
// frame, which has what the search needs of a worker: messages, and the loading of scripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      const load = (address) =>
        new Promise((done, failed) => {
          const script = this.inside.document.createElement("script")
          Object.assign(script, { src: address, onload: done, onerror: failed })
          this.inside.document.head.appendChild(script)
        })
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      this.loaded = load(url)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

// A search for "all_reduce" also looks for names that begin so, and would rank these rarer names
// first. So each word is looked for as a whole, too, and that counts more.
const Plain = window.Worker
window.Worker = class extends Plain {
  postMessage(message) {
    const isQuery = typeof message.data === "string"
    const data = isQuery ? message.data.replace(/(?<!\S)\w+(?!\S)/g, "$&^9 $&") : message.data
    super.postMessage({ ...message, data })
  }
}
